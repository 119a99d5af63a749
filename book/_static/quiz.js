// Makes the quiz forms live and keeps the answers in this browser. Without it every answer is in a folded block.
(() => {
  "use strict";
  const KEY = "verl-course.quiz.v1";
  const FORMAT = "verl-course-progress";
  const STATES = ["right", "wrong", "unknown"];

  // ---- the store: {chapter: {question: {h: hash, s: state, a: answer}}} ----

  function cleaned(data) {
    // Keeps what has the right shape; returns null when the whole is not a store.
    if (typeof data !== "object" || data === null || Array.isArray(data)) return null;
    const store = {};
    for (const [chapter, answers] of Object.entries(data)) {
      if (!/^\w{1,60}$/.test(chapter) || typeof answers !== "object" || answers === null) return null;
      const kept = {};
      for (const [id, entry] of Object.entries(answers)) {
        const fine = /^[a-z0-9-]{1,80}$/.test(id) && entry && /^[0-9a-f]{10}$/.test(entry.h) && STATES.includes(entry.s);
        const answer = entry && entry.a;
        const text = (value) => typeof value === "string" && value.length <= 500;
        const shaped = answer === null || text(answer) || (Array.isArray(answer) && answer.length <= 30 && answer.every(text));
        if (!fine || !shaped) return null;
        kept[id] = { h: entry.h, s: entry.s, a: answer };
      }
      store[chapter] = kept;
    }
    return store;
  }

  function load() {
    try {
      return cleaned(JSON.parse(localStorage.getItem(KEY) || "{}")) || {};
    } catch {
      return {}; // storage is closed or holds something else: the page still works, save() says so
    }
  }

  function save(store) {
    try {
      localStorage.setItem(KEY, JSON.stringify(store));
      return true;
    } catch {
      return false;
    }
  }

  // ---- comparing ----

  function normalise(text) {
    return text.normalize("NFKC").trim().replace(/^[`'"“”‘’]+|[`'"“”‘’]+$/g, "").trim().replace(/\s+/g, " ").toLowerCase();
  }

  function number(text) {
    const plain = normalise(text).replace(/[,_ ]/g, "").replace("−", "-");
    const fraction = plain.match(/^(-?\d+(?:\.\d+)?)\/(\d+(?:\.\d+)?)$/);
    if (fraction) return Number(fraction[1]) / Number(fraction[2]);
    return plain === "" ? NaN : Number(plain);
  }

  const close = (a, b, tolerance) => Math.abs(a - b) <= tolerance + 1e-9 * Math.max(1, Math.abs(b));
  const same = (a, b) => a.length === b.length && a.every((value, i) => value === b[i]);

  // ---- one question ----

  class Question {
    constructor(form, chapter) {
      this.form = form;
      this.chapter = chapter;
      this.id = form.dataset.id;
      this.hash = form.dataset.hash;
      this.kind = form.dataset.kind;
      this.right = JSON.parse(form.dataset.answer);
      this.slips = JSON.parse(form.dataset.wrong || "[]");
      this.feedback = form.querySelector(".quiz-feedback");
      this.solution = form.querySelector(".quiz-solution");
      this.retry = form.querySelector(".quiz-retry");
      this.initialOrder = this.kind === "order" ? this.keys() : null;
      this.solution.hidden = true;
      form.classList.add("is-live");
      form.addEventListener("submit", (event) => {
        event.preventDefault();
        this.check();
      });
      form.querySelector(".quiz-unknown").addEventListener("click", () => this.giveUp());
      this.retry.addEventListener("click", () => this.again());
      if (this.kind === "order") this.armOrder();
    }

    keys() {
      return [...this.form.querySelectorAll(".quiz-order li")].map((item) => item.dataset.key);
    }

    answer() {
      if (this.kind === "order") return this.keys();
      if (this.kind === "number" || this.kind === "text") return this.form.querySelector(".quiz-typed input").value.trim() || null;
      const chosen = [...this.form.querySelectorAll("input:checked")].map((input) => input.value).sort();
      if (!chosen.length) return null;
      return this.kind === "single" ? chosen[0] : chosen;
    }

    isRight(answer) {
      if (this.kind === "single") return answer === this.right;
      if (this.kind === "multi" || this.kind === "order") return same(answer, this.right);
      if (this.kind === "number") return close(number(answer), this.right.value, this.right.tolerance);
      return this.right.some((text) => normalise(text) === normalise(answer));
    }

    check() {
      const answer = this.answer();
      if (answer === null) return this.say("先作答；没有把握就按“不知道”。");
      if (this.kind === "number" && Number.isNaN(number(answer))) return this.say("这里要填一个数。");
      const right = this.isRight(answer);
      this.record(right ? "right" : "wrong", answer);
      this.show(right ? "right" : "wrong", answer);
    }

    giveUp() {
      this.record("unknown", null);
      this.show("unknown", null);
    }

    again() {
      this.form.reset();
      if (this.initialOrder) this.arrange(this.initialOrder);
      this.mark(null);
      this.feedback.replaceChildren();
      const first = this.form.querySelector("input, .quiz-order button");
      if (first) first.focus();
    }

    record(state, answer) {
      const store = load();
      store[this.chapter] = store[this.chapter] || {};
      store[this.chapter][this.id] = { h: this.hash, s: state, a: answer };
      if (!save(store)) this.unsaved = true;
      document.dispatchEvent(new CustomEvent("quiz-progress"));
    }

    restore(entry) {
      if (entry.a !== null) {
        if (this.kind === "order") {
          if (same([...entry.a].sort(), [...this.initialOrder].sort())) this.arrange(entry.a);
        } else if (this.kind === "number" || this.kind === "text") {
          this.form.querySelector(".quiz-typed input").value = entry.a;
        } else {
          const chosen = [].concat(entry.a);
          for (const input of this.form.querySelectorAll("input")) input.checked = chosen.includes(input.value);
        }
      }
      this.show(entry.s, entry.a);
    }

    mark(state) {
      for (const name of STATES) this.form.classList.toggle(`is-${name}`, name === state);
      this.retry.hidden = state === null;
      this.solution.hidden = state === null || state === "wrong";
      this.solution.open = state === "right" || state === "unknown";
    }

    show(state, answer) {
      this.mark(state);
      const words = { right: "对。", wrong: "不对。", unknown: "没关系，看完理由再做一次。" };
      const parts = [this.paragraph(words[state], "quiz-verdict")];
      if (state !== "unknown") parts.push(...this.reasons(answer, state));
      if (state === "wrong") parts.push(this.paragraph("改好以后再按“检查”，或按“不知道”看答案。", "quiz-hint"));
      if (this.unsaved) parts.push(this.paragraph("这个浏览器不让本站保存进度。", "quiz-hint"));
      this.feedback.replaceChildren(...parts);
    }

    reasons(answer, state) {
      const reason = (key) => {
        const entry = this.solution.querySelector(`.quiz-reasons [data-key="${CSS.escape(key)}"] .quiz-reason`);
        const line = this.paragraph("", "quiz-why");
        line.append(...[...entry.cloneNode(true).childNodes]);
        return line;
      };
      if (this.kind === "single") return [reason(answer)];
      if (this.kind === "multi") {
        if (state === "right") return [];
        const bad = answer.filter((key) => !this.right.includes(key)).map(reason);
        const short = this.right.some((key) => !answer.includes(key));
        return short ? [...bad, this.paragraph("还有该选的没有选到。", "quiz-why")] : bad;
      }
      if (this.kind === "order" && state === "wrong") {
        const first = answer.findIndex((key, i) => key !== this.right[i]);
        return [this.paragraph(`从第 ${first + 1} 项开始顺序不对。`, "quiz-why")];
      }
      if (state === "wrong") {
        const hit = this.slips.findIndex((slip) =>
          this.kind === "number" ? close(number(answer), Number(slip), this.right.tolerance) : normalise(String(slip)) === normalise(answer));
        if (hit >= 0) return [reason(String(hit))];
      }
      return [];
    }

    say(text) {
      this.feedback.replaceChildren(this.paragraph(text, "quiz-hint"));
    }

    paragraph(text, name) {
      const line = document.createElement("p");
      line.className = name;
      line.textContent = text;
      return line;
    }

    // ---- order: buttons, so that a keyboard is enough ----

    armOrder() {
      const list = this.form.querySelector(".quiz-order");
      list.addEventListener("click", (event) => {
        const button = event.target.closest("button");
        if (!button) return;
        const item = button.closest("li");
        const up = button.classList.contains("quiz-up");
        const other = up ? item.previousElementSibling : item.nextElementSibling;
        if (!other) return;
        up ? other.before(item) : other.after(item);
        this.label();
        (button.disabled ? item.querySelector("button:not(:disabled)") : button).focus();
        const place = this.keys().indexOf(item.dataset.key) + 1;
        this.say(`移到第 ${place} 位：${item.querySelector(".quiz-item-text").textContent}`);
      });
      this.label();
    }

    arrange(keys) {
      const list = this.form.querySelector(".quiz-order");
      for (const key of keys) list.append(list.querySelector(`[data-key="${CSS.escape(key)}"]`));
      this.label();
    }

    label() {
      const items = [...this.form.querySelectorAll(".quiz-order li")];
      items.forEach((item, i) => {
        const name = item.querySelector(".quiz-item-text").textContent;
        const [up, down] = item.querySelectorAll("button");
        up.disabled = i === 0;
        down.disabled = i === items.length - 1;
        up.setAttribute("aria-label", `上移：${name}`);
        down.setAttribute("aria-label", `下移：${name}`);
      });
    }
  }

  // ---- a page ----

  function startQuiz(block) {
    const chapter = block.dataset.chapter;
    const questions = [...block.querySelectorAll(".quiz-question")].map((form) => new Question(form, chapter));
    const store = load();
    const kept = store[chapter] || {};
    const live = new Map(questions.map((question) => [question.id, question]));
    let stale = false;
    for (const id of Object.keys(kept)) {
      if (!live.has(id) || live.get(id).hash !== kept[id].h) {
        delete kept[id]; // the question was changed: what was answered is another question
        stale = true;
      } else {
        live.get(id).restore(kept[id]);
      }
    }
    if (stale) save(store);
    return () => {
      const now = load()[chapter] || {};
      const count = (state) => Object.values(now).filter((entry) => entry.s === state).length;
      const text = `共 ${questions.length} 题，答对 ${count("right")}` + (count("unknown") ? `，不知道 ${count("unknown")}` : "");
      block.querySelector(".quiz-progress").textContent = `${text}。`;
      for (const place of document.querySelectorAll(`.chapter-progress[data-chapter="${chapter}"]`)) place.textContent = text;
    };
  }

  function refreshRoutes() {
    const store = load();
    for (const place of document.querySelectorAll(".route-progress")) {
      const hashes = JSON.parse(place.dataset.questions);
      const kept = store[place.dataset.chapter] || {};
      const total = Object.keys(hashes).length;
      const right = Object.keys(hashes).filter((id) => kept[id] && kept[id].h === hashes[id] && kept[id].s === "right").length;
      place.textContent = `检查题 ${right}/${total}`;
      place.style.setProperty("--done", `${(100 * right) / total}%`);
      place.classList.toggle("is-done", right === total);
    }
  }

  function startPanel(panel) {
    const status = panel.querySelector(".progress-status");
    const reset = panel.querySelector(".progress-reset");
    panel.querySelector(".progress-export").addEventListener("click", () => {
      const body = JSON.stringify({ format: FORMAT, version: 1, saved: new Date().toISOString(), quiz: load() }, null, 1);
      const link = document.createElement("a");
      link.href = URL.createObjectURL(new Blob([body], { type: "application/json" }));
      link.download = "verl-course-progress.json";
      link.click();
      URL.revokeObjectURL(link.href);
      status.textContent = "已导出 verl-course-progress.json。";
    });
    panel.querySelector(".progress-import input").addEventListener("change", async (event) => {
      const [file] = event.target.files;
      if (!file) return;
      status.textContent = await importFile(file);
      event.target.value = "";
      document.dispatchEvent(new CustomEvent("quiz-progress"));
    });
    reset.addEventListener("click", () => {
      if (!reset.dataset.armed) {
        reset.dataset.armed = "yes";
        reset.textContent = "再按一次，确认清空";
        setTimeout(() => {
          delete reset.dataset.armed;
          reset.textContent = "清空进度";
        }, 6000);
        return;
      }
      delete reset.dataset.armed;
      reset.textContent = "清空进度";
      status.textContent = save({}) ? "进度已清空。" : "这个浏览器不让本站保存进度。";
      document.dispatchEvent(new CustomEvent("quiz-progress"));
    });
  }

  async function importFile(file) {
    if (file.size > 1e6) return "没有导入：文件超过 1 MB。";
    let data;
    try {
      data = JSON.parse(await file.text());
    } catch {
      return "没有导入：这不是 JSON 文件。";
    }
    if (!data || data.format !== FORMAT || data.version !== 1) return "没有导入：这不是本站导出的进度文件。";
    const fresh = cleaned(data.quiz);
    if (!fresh) return "没有导入：文件里的记录格式不对。";
    const store = load();
    let count = 0;
    for (const [chapter, answers] of Object.entries(fresh)) {
      store[chapter] = Object.assign(store[chapter] || {}, answers);
      count += Object.keys(answers).length;
    }
    return save(store) ? `导入了 ${count} 条记录。` : "没有导入：这个浏览器不让本站保存进度。";
  }

  function start() {
    const refreshers = [...document.querySelectorAll(".quiz")].map(startQuiz);
    document.querySelectorAll(".progress-panel").forEach(startPanel);
    const refresh = () => {
      refreshers.forEach((update) => update());
      refreshRoutes();
    };
    document.addEventListener("quiz-progress", refresh);
    window.addEventListener("storage", (event) => {
      if (event.key === KEY) refresh();
    });
    refresh();
  }

  start(); // the script is deferred: the page is parsed
})();
