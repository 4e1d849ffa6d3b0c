// Canvases that are sharp on every screen.

/** Give a canvas this size in CSS pixels; returns its context, cleared. */
export function prepare(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  const [pixelWidth, pixelHeight] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== pixelWidth || canvas.height !== pixelHeight) {
    canvas.width = pixelWidth;
    canvas.height = pixelHeight;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

/** Diagonal stripes over a rectangle. */
export function hatch(context, x, y, width, height, color, gap = 5) {
  context.save();
  context.beginPath();
  context.rect(x, y, width, height);
  context.clip();
  context.beginPath();
  for (let at = -height; at < width; at += gap) {
    context.moveTo(x + at, y + height);
    context.lineTo(x + at + height, y);
  }
  context.strokeStyle = color;
  context.lineWidth = 1.4;
  context.stroke();
  context.restore();
}
