// The tokens of a rollout: their ids (the coordinator knows no texts), coloured by what an update measured of them or by
// the log-prob that they were made with, the masked ones plain.
import { count, real, words } from "../format.js";
import { html } from "../lib.js";
import { go, to } from "../router.js";

const PAGE = 1000;
const BEHAVIOUR = "behaviour";

const signed = (x, digits) => (x > 0 ? `+${real(x, digits)}` : real(x, digits));
const largest = (rank) => (a, b) => rank(b) - rank(a);

/**
 * What tokens may be coloured by. steps: from where on each colour stands for a rank, the highest rank last, and what the
 * legend says of it; rank: of a token's value, the higher the more it stands out.
 */
const DIFFERENCE = {
  name: "differences",
  rank: Math.abs,
  steps: [
    [0, "|d| < 0.02"],
    [0.02, "0.02 to 0.1"],
    [0.1, "0.1 to 0.3"],
    [0.3, "0.3 to 0.69"],
    [Math.LN2, "|d| > 0.69: ratio outside [0.5, 2]"],
  ],
  most: "Largest differences",
  show: signed,
};
const LOG_PROB = {
  name: "behaviour log-probs",
  rank: (logProb) => -logProb,
  steps: [
    [-Infinity, "p > 0.90"],
    [0.1, "0.61 to 0.90"],
    [0.5, "0.22 to 0.61"],
    [1.5, "0.05 to 0.22"],
    [3, "p < 0.05"],
  ],
  most: "Least expected",
  show: real,
};
const stepOf = ({ rank, steps }, value) => steps.findLastIndex(([from]) => rank(value) >= from);

function Legend({ by }) {
  return html`<ul class="legend" aria-label="What the colours mean">
    ${by.steps.map(([, text], step) => html`<li><span class="tok l${step}">id</span> ${text}</li>`)}
    <li><span class="tok masked">id</span> masked: not the policy's</li>
  </ul>`;
}

function Token({ position, token, action, by, value, logProb, difference, span, row }) {
  const about = [
    `position ${position}`,
    `token ${token}`,
    action ? `action, log-prob ${real(logProb, 5)}, p ${real(Math.exp(logProb))}` : "masked",
    action && difference !== null && `difference ${signed(difference, 4)}, ratio ${real(Math.exp(difference))}`,
    span && `version ${span.version}`,
    row && "a training row begins here",
  ];
  return html`<li class="tok ${action ? `l${stepOf(by, value)}` : "masked"} ${row ? "row" : ""}" title=${about.filter(Boolean).join(", ")}>
    ${span && span.start === position && html`<b class="from">v${span.version}</b>`}<span>${token}</span><small>${action ? by.show(value, 2) : html`<span class="quiet">masked</span>`}</small>
  </li>`;
}

/** Which update's measurement the tokens are coloured by, or their log-probs; in the address, as every choice is. */
function Choice({ measured, chosen, choose }) {
  if (measured.length === 0) return null;
  return html`<div class="filters"><label>Coloured by <select onChange=${(event) => choose(event.target.value)}>
    ${measured.map(({ update_id: update, verdict, revision }) => html`<option value=${revision} selected=${revision === chosen?.revision}>difference, as ${update} measured it: ${words(verdict)}</option>`)}
    <option value=${BEHAVIOUR} selected=${chosen === null}>behaviour log-prob</option>
  </select></label></div>`;
}

/** measured: what `…/differences` told, the first one first. query: `from`, a position; `by`, a revision or `behaviour`. */
export function Tokens({ run, id, spans, evidence, measured, query }) {
  const { token_ids: tokens, action_mask: mask, behavior_log_probs: logProbs, row_starts: rows } = evidence;
  const chosen = query.by === BEHAVIOUR ? null : (measured.find(({ revision }) => String(revision) === query.by) ?? measured.at(-1) ?? null);
  const by = chosen === null ? LOG_PROB : DIFFERENCE;
  const values = chosen === null ? logProbs : chosen.differences;
  const actions = mask.map((action, position) => (action ? position : -1)).filter((position) => position >= 0);
  const mean = actions.reduce((sum, position) => sum + logProbs[position], 0) / Math.max(1, actions.length);
  const most = [...actions].sort(largest((position) => by.rank(values[position]))).slice(0, 5);
  const from = Number(query.from ?? 0);
  const begin = Math.min(Math.max(0, Math.floor(from / PAGE) * PAGE), Math.floor(Math.max(0, tokens.length - 1) / PAGE) * PAGE);
  const end = Math.min(begin + PAGE, tokens.length);
  const page = (start) => to("runs", run, "rollouts", id, { ...query, from: start });
  const choose = (choice) => go(to("runs", run, "rollouts", id, { ...query, by: choice }), { replace: true });
  return html`<p>${count(tokens.length)} tokens, ${count(actions.length)} of them actions with a mean log-prob of ${real(mean)} under the weights that made them${chosen && html`,
      and a mean |d| of ${real(chosen.drift)} from these to the weights of <a class="id" href=${to("runs", run, "updates", chosen.update_id)}>${chosen.update_id}</a>`}.${" "}
      ${by.most}: ${most.map((position, number) => html`${number > 0 && ", "}<a href=${page(position)}>no. ${position}</a> (${by.show(values[position], 3)})`)}.</p>
    <${Choice} measured=${measured} chosen=${chosen} choose=${choose} />
    <${Legend} by=${by} />
    ${tokens.length > PAGE && html`<p class="pages">Tokens ${begin} to ${end - 1}. ${begin > 0 && html`<a href=${page(begin - PAGE)}>Before</a>`} ${end < tokens.length && html`<a href=${page(end)}>After</a>`}</p>`}
    <ol class="tokens" start=${begin} tabindex="0" aria-label="Token ids with their ${by.name}">
      ${tokens.slice(begin, end).map((token, offset) => {
        const position = begin + offset;
        return html`<${Token} key=${position} position=${position} token=${token} action=${mask[position]} by=${by} value=${values[position]} logProb=${logProbs[position]} difference=${chosen && chosen.differences[position]} span=${spans.find((each) => each.start <= position && position < each.end)} row=${position > 0 && rows.includes(position)} />`;
      })}
    </ol>`;
}
