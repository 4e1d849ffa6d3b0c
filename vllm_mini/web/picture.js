// The view as a PNG: the page's own elements and styles inside an SVG, drawn on a canvas.

/** Let the browser save a blob under this name. */
export function download(blob, name) {
  const link = Object.assign(document.createElement("a"), { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

/** Save what the window shows. */
export async function savePicture(name) {
  const canvas = await drawPage();
  canvas.toBlob((blob) => download(blob, name), "image/png");
}

async function drawPage() {
  const [width, height] = [document.documentElement.clientWidth, Math.max(innerHeight, document.body.scrollHeight)];
  const css = await (await fetch("web/style.css")).text();
  const body = document.body.cloneNode(true);
  const originals = document.body.querySelectorAll("canvas, input, select, img");
  for (const [index, copy] of [...body.querySelectorAll("canvas, input, select, img")].entries()) freeze(copy, originals[index]);
  body.querySelectorAll("script, dialog").forEach((element) => element.remove());
  const page = document.createElementNS("http://www.w3.org/1999/xhtml", "html");
  page.dataset.theme = document.documentElement.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  page.append(Object.assign(document.createElement("style"), { textContent: css }), body);
  const markup = new XMLSerializer().serializeToString(page);
  const svg = `<svg xmlns="http://www.w3.org/2000/svg" width="${width}" height="${height}"><foreignObject width="100%" height="100%">${markup}</foreignObject></svg>`;
  const picture = new Image();
  picture.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(svg)}`;
  await picture.decode();
  const ratio = window.devicePixelRatio || 1;
  const canvas = Object.assign(document.createElement("canvas"), { width: width * ratio, height: height * ratio });
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  context.drawImage(picture, 0, 0);
  return canvas;
}

/** What an element holds that its markup does not say. */
function freeze(copy, original) {
  if (original.tagName === "CANVAS") {
    const image = Object.assign(document.createElement("img"), { src: original.toDataURL() });
    image.style.cssText = original.style.cssText;
    copy.replaceWith(image);
  } else if (original.tagName === "SELECT") {
    [...copy.options].forEach((option, index) => option.toggleAttribute("selected", index === original.selectedIndex));
  } else if (original.tagName === "INPUT") {
    copy.setAttribute("value", original.value);
    copy.toggleAttribute("checked", original.checked);
  } else {
    copy.remove(); // an image that an SVG may not load
  }
}
