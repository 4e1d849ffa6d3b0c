// Colours of requests: Okabe and Ito's palette, which people with any colour vision can tell apart. A label always stands
// beside a colour, so nothing is said by colour alone.

const PALETTE = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#b9a900", "#7f6fc4"];

export function colorOf(number) {
  return PALETTE[number % PALETTE.length];
}

/** Black or white, whichever can be read on this colour. */
export function inkOn(color) {
  const [red, green, blue] = [1, 3, 5].map((at) => parseInt(color.slice(at, at + 2), 16) / 255)
    .map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.179 ? "#111" : "#fff";
}

/** A colour of the style sheet, for canvases. */
export function themed(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}
