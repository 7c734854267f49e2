// Numbers, times and hashes as text. Times are UTC, as in the coordinator's logs.
const whole = new Intl.NumberFormat("en");

export const count = (n) => (n === null || n === undefined ? "–" : whole.format(n));

/** A real number with so many significant digits, in full where that is short. */
export function real(x, digits = 3) {
  if (x === null || x === undefined) return "–";
  if (x === 0) return "0";
  const size = Math.abs(x);
  return size >= 1e5 || size < 1e-4 ? x.toExponential(digits - 1) : String(Number(x.toPrecision(digits)));
}

export function rate(perSecond) {
  const perMinute = perSecond * 60;
  return perMinute >= 6000 ? `${real(perSecond)}/s` : `${real(perMinute)}/min`;
}

/** 8 s, 4 min 10 s, 3 h 5 min, 2 d 4 h. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const s = Math.max(0, seconds);
  if (s < 10) return `${Number(s.toFixed(1))} s`;
  if (s < 60) return `${Math.floor(s)} s`;
  const [big, small, per, of] = s < 3600 ? ["min", "s", 60, 1] : s < 86400 ? ["h", "min", 3600, 60] : ["d", "h", 86400, 3600];
  const rest = Math.floor((s % per) / of);
  return `${Math.floor(s / per)} ${big}${rest ? ` ${rest} ${small}` : ""}`;
}

export const exact = (time) => new Date(time).toISOString().replace("T", " ").replace("Z", " UTC");
export const timeOfDay = (time) => new Date(time).toISOString().slice(11, 19);
export const bytes = (n) => {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let size = n, unit = 0;
  while (size >= 1000 && unit < units.length - 1) [size, unit] = [size / 1000, unit + 1];
  return `${real(size)} ${units[unit]}`;
};

/** A code of the API as words: policy_drift -> policy drift. */
export const words = (code) => String(code).replaceAll("_", " ");
export const title = (code) => words(code).replace(/^./, (first) => first.toUpperCase());
