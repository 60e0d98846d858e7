"use strict";
// What the buttons of the page do: they call the server's own API. The key stays in its field, and goes into headers.
const ditile = (() => {
  const POLL_MS = 500;
  const MOST_SHOWN = 24;
  // The model as /v1/models describes it, and the controller of the running call.
  let model = null;
  let running = null;

  const find = (id) => document.querySelector(`#ditile-${id}`);

  async function ask(key, path, how = {}) {
    // A header holds the bytes of the key in UTF-8.
    const bytes = String.fromCharCode(...new TextEncoder().encode(key ?? ""));
    const headers = bytes ? { authorization: `Bearer ${bytes}` } : {};
    const answer = await fetch(path, { ...how, headers });
    if (answer.ok) return answer;
    const text = await answer.text();
    const error = new Error(`the server answered ${answer.status}`);
    if (text.startsWith('{"error"')) error.message = JSON.parse(text).error.message;
    error.status = answer.status;
    throw error;
  }

  const wait = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

  function say(text, isWrong = false) {
    const line = find("said");
    line.textContent = text;
    line.setAttribute("role", isWrong ? "alert" : "status");
  }

  function showStep(step, steps, text) {
    say(text);
    find("bar").value = step / steps;
  }

  // Returns the update of a field: whether the model takes it, and the model's own value as the placeholder.
  function describeField(name) {
    const defaults = model.defaults;
    const kinds = { n: "image", num_frames: "video", fps: "video" };
    let visible = (kinds[name] ?? model.kind) === model.kind;
    if (["guidance_scale", "true_cfg_scale", "strength"].includes(name)) visible = name in defaults;
    if (name === "negative_prompt") visible = model.negative_prompt;
    if (name === "lora") visible = model.loras.length > 0;
    const own = { ...defaults, n: 1, seed: "random", lora: `${model.loras[0]}:0.8` };
    return { __type__: "update", visible, placeholder: String(own[name] ?? "") };
  }

  async function open(names, key) {
    const same = { __type__: "update" };
    const shown = { __type__: "update", visible: true };
    try {
      model = (await (await ask(key, "v1/models")).json()).data[0];
    } catch (error) {
      say(error.status === 401 && !key ? "Enter a key of this server." : error.message, Boolean(key));
      if (error.status === 401) return [same, shown, ...names.map(() => same)];
      // The ranks are still loading the model.
      await wait(4 * POLL_MS);
      return open(names, key);
    }
    say(model.loras.length ? `LoRAs: ${model.loras.join(", ")}` : "");
    find("edit").hidden = !model.edits;
    return [`# ditile\n${model.id}`, key ? shown : same, ...names.map(describeField)];
  }

  async function generate(names, key, ...values) {
    if (running !== null || model === null) return;
    const controller = (running = new AbortController());
    const form = new FormData();
    names.forEach((name, index) => {
      if (values[index] !== null && values[index] !== "") form.append(name, values[index]);
    });
    const image = model.edits ? find("image").files[0] : undefined;
    if (image) form.append("image", image);
    else form.delete("strength");
    find("running").hidden = false;
    showStep(0, 1, "Waits for its turn ..");
    try {
      const make = model.kind === "video" ? makeVideo : makeImages;
      await make(key, form, controller.signal);
    } catch (error) {
      const isCancelled = controller.signal.aborted;
      say(isCancelled ? "Cancelled." : error.message, !isCancelled);
    }
    find("running").hidden = true;
    find("preview").hidden = true;
    running = null;
  }

  async function makeImages(key, form, signal) {
    form.append("stream", "true");
    form.append("partial_images", "3");
    const path = form.has("image") ? "v1/images/edits" : "v1/images/generations";
    const answer = await ask(key, path, { method: "POST", body: form, signal });
    for await (const line of readLines(answer.body)) {
      const step = /^: step (\d+) of (\d+)$/.exec(line);
      if (step) showStep(Number(step[1]), Number(step[2]), `Step ${step[1]} of ${step[2]}`);
      if (!line.startsWith("data: ")) continue;
      const event = JSON.parse(line.slice(6));
      if (event.error) throw new Error(event.error.message);
      const content = Uint8Array.from(atob(event.b64_json), (letter) => letter.charCodeAt(0));
      if (event.type.endsWith(".completed")) showResult("img", new Blob([content], { type: "image/png" }), event);
      else Object.assign(find("preview"), { src: `data:image/png;base64,${event.b64_json}`, hidden: false });
    }
  }

  // A line may have megabytes of base64, so its pieces are joined only when its end is there.
  async function* readLines(stream) {
    const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
    let pieces = [];
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      pieces.push(value);
      if (!value.includes("\n")) continue;
      const lines = pieces.join("").split(/\r?\n/);
      pieces = [lines.pop()];
      yield* lines;
    }
  }

  async function makeVideo(key, form, signal) {
    let video = await (await ask(key, "v1/videos", { method: "POST", body: form })).json();
    const path = `v1/videos/${video.id}`;
    while (video.status === "queued" || video.status === "in_progress") {
      await wait(POLL_MS);
      if (signal.aborted) await ask(key, path, { method: "DELETE" });
      signal.throwIfAborted();
      video = await (await ask(key, path)).json();
      if (video.progress) showStep(video.progress, 100, `${video.progress} %`);
    }
    if (video.error) throw new Error(video.error.message);
    const answer = await ask(key, `${path}/content`, { signal });
    showResult("video", await answer.blob(), video);
  }

  function showResult(kind, blob, facts) {
    const media = document.createElement(kind);
    media.src = URL.createObjectURL(blob);
    Object.assign(media, kind === "video" ? { controls: true, loop: true } : { alt: "result" });
    const name = `${model.id.replaceAll("/", "-")}-${facts.seed}.${kind === "video" ? "mp4" : "png"}`;
    const link = document.createElement("a");
    Object.assign(link, { href: media.src, download: name, textContent: "Download" });
    const text = document.createElement("figcaption");
    text.append(`seed ${facts.seed} · ${facts.size} · ${facts.inference_time_s.toFixed(2)} s `, link);
    const figure = document.createElement("figure");
    figure.append(media, text);
    const gallery = find("gallery");
    gallery.prepend(figure);
    const oldest = gallery.children[MOST_SHOWN];
    if (oldest) URL.revokeObjectURL(oldest.firstChild.src);
    oldest?.remove();
    say(["Generated.", ...facts.warnings].join(" "));
  }

  return { open, generate, cancel: () => running?.abort() };
})();
