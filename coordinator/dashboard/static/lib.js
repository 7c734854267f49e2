// The libraries, at one place. Their versions and hashes are in vendor/lock.json.
export { html, render, useCallback, useEffect, useMemo, useRef, useState } from "./vendor/htm-3.1.1/standalone.module.js";
export { default as uPlot } from "./vendor/uplot-1.6.32/uPlot.esm.js";
