// Over a chart: a line at the nearest step, and the values there.
const tip = document.body.appendChild(Object.assign(document.createElement("div"), { className: "tip", hidden: true }));
for (const chart of document.querySelectorAll("svg.chart")) {
  const { box: [left, right, top, bottom], x: [least, greatest], series } = JSON.parse(chart.dataset.chart);
  const cursor = chart.querySelector(".cursor");
  chart.addEventListener("mousemove", (event) => {
    const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(chart.getScreenCTM().inverse()).x;
    const wanted = least + (at - left) / (right - left) * (greatest - least);
    const nearest = series.map(([, , points]) => points.reduce((a, b) => Math.abs(b[0] - wanted) < Math.abs(a[0] - wanted) ? b : a));
    const step = nearest.reduce((a, b) => Math.abs(b[0] - wanted) < Math.abs(a[0] - wanted) ? b : a)[0];
    const x = left + (step - least) / (greatest - least || 1) * (right - left);
    cursor.setAttribute("d", `M${x},${top}V${bottom}`);
    tip.replaceChildren(`step ${step}`);
    series.forEach(([label, colour], i) => {
      if (nearest[i][0] !== step) return;
      const row = tip.appendChild(document.createElement("div"));
      row.appendChild(document.createElement("i")).style.background = colour;
      row.append(`${label} ${nearest[i][1]}`);
    });
    tip.hidden = false;
    tip.style.top = `${event.clientY + 14}px`;
    tip.style.left = `${Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8)}px`;
  });
  chart.addEventListener("mouseleave", () => { tip.hidden = true; cursor.removeAttribute("d"); });
}
