// Signing in with a token. It stays in this tab, and goes nowhere but into the Authorization header.
import { Problem, read } from "../api.js";
import { html, useEffect, useRef, useState } from "../lib.js";
import { session, signIn } from "../session.js";
import { useStore } from "../store.js";

export function SignIn() {
  const { said } = useStore(session);
  const [problem, setProblem] = useState(null), [asking, setAsking] = useState(false);
  const field = useRef(null);
  useEffect(() => {
    document.title = "Sign in · Rollout coordinator";
    field.current.focus();
  }, []);

  async function submit(event) {
    event.preventDefault();
    const token = field.current.value.trim();
    if (!/^[\x21-\x7e]+$/.test(token)) {
      setProblem("This is no token: a token is one line of letters, digits, - and _.");
      return;
    }
    setAsking(true);
    try {
      await read(["runs"], {}, { token });
      signIn(token);
    } catch (error) {
      if (!(error instanceof Problem)) throw error;
      setAsking(false);
      setProblem(error.status === 401 ? "This token is not accepted: it is unknown, has expired or was revoked." : `${error.message}. ${error.nextStep}`);
      field.current.select();
    }
  }

  return html`<main class="alone">
    <form class="signin" onSubmit=${submit}>
      <h1><img src="icon.svg" width="28" height="28" alt="" /> Rollout coordinator</h1>
      ${said && html`<p class="trouble" role="alert">${said}</p>`}
      <label for="token">Token</label>
      <input id="token" ref=${field} type="password" autocomplete="off" spellcheck=${false} required aria-describedby="about" aria-invalid=${problem !== null} />
      ${problem && html`<p class="trouble" role="alert">${problem}</p>`}
      <button class="primary" disabled=${asking}>${asking ? "Asking…" : "Sign in"}</button>
      <p id="about" class="empty">A token of any role may look; a viewer's may do nothing else. An admin makes one with <code>coordinator token create --role viewer --name NAME</code>. It is kept in this tab only, until you sign out or close it.</p>
    </form>
  </main>`;
}
