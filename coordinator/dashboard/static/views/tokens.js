// The tokens of a rollout: their ids (the coordinator knows no texts), coloured by log-prob, the masked ones plain.
import { count, real } from "../format.js";
import { html } from "../lib.js";
import { to } from "../router.js";

const PAGE = 1000;

/** Steps of a log-prob, from what the policy was sure of to what hardly was. */
const STEPS = [
  [-0.1, "p > 0.90"],
  [-0.5, "0.61 to 0.90"],
  [-1.5, "0.22 to 0.61"],
  [-3, "0.05 to 0.22"],
  [-Infinity, "p < 0.05"],
];
const stepOf = (logProb) => STEPS.findIndex(([from]) => logProb >= from);

function Legend() {
  return html`<ul class="legend" aria-label="What the colours mean">
    ${STEPS.map(([, text], step) => html`<li><span class="tok l${step}">id</span> ${text}</li>`)}
    <li><span class="tok masked">id</span> masked: not the policy's</li>
  </ul>`;
}

function Token({ position, token, action, logProb, span, row }) {
  const about = [`position ${position}`, `token ${token}`, action ? `action, log-prob ${real(logProb, 5)}, p ${real(Math.exp(logProb))}` : "masked", span && `version ${span.version}`, row && "a training row begins here"];
  return html`<li class="tok ${action ? `l${stepOf(logProb)}` : "masked"} ${row ? "row" : ""}" title=${about.filter(Boolean).join(", ")}>
    ${span && span.start === position && html`<b class="from">v${span.version}</b>`}<span>${token}</span><small>${action ? real(logProb, 2) : html`<span class="quiet">masked</span>`}</small>
  </li>`;
}

export function Tokens({ run, id, spans, evidence, from }) {
  const { token_ids: tokens, action_mask: mask, behavior_log_probs: logProbs, row_starts: rows } = evidence;
  const actions = mask.map((action, position) => (action ? position : -1)).filter((position) => position >= 0);
  const mean = actions.reduce((sum, position) => sum + logProbs[position], 0) / Math.max(1, actions.length);
  const lowest = [...actions].sort((a, b) => logProbs[a] - logProbs[b]).slice(0, 5);
  const begin = Math.min(Math.max(0, Math.floor(from / PAGE) * PAGE), Math.floor(Math.max(0, tokens.length - 1) / PAGE) * PAGE);
  const end = Math.min(begin + PAGE, tokens.length);
  const page = (start) => to("runs", run, "rollouts", id, { from: start });
  return html`<p>${count(tokens.length)} tokens, ${count(actions.length)} of them actions with a mean log-prob of ${real(mean)} under the weights that made them.
      Least expected: ${lowest.map((position, number) => html`${number > 0 && ", "}<a href=${page(position)}>no. ${position}</a> (${real(logProbs[position])})`)}.</p>
    <${Legend} />
    ${tokens.length > PAGE && html`<p class="pages">Tokens ${begin} to ${end - 1}. ${begin > 0 && html`<a href=${page(begin - PAGE)}>Before</a>`} ${end < tokens.length && html`<a href=${page(end)}>After</a>`}</p>`}
    <ol class="tokens" start=${begin} tabindex="0" aria-label="Token ids with their behaviour log-probs">
      ${tokens.slice(begin, end).map((token, offset) => {
        const position = begin + offset;
        return html`<${Token} key=${position} position=${position} token=${token} action=${mask[position]} logProb=${logProbs[position]} span=${spans.find((each) => each.start <= position && position < each.end)} row=${position > 0 && rows.includes(position)} />`;
      })}
    </ol>`;
}
