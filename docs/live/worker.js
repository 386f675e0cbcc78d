// What the page asks for, computed beside it. A message is [number, name of a task, arguments …].
import { DistilBERT, GPT2, logSumExp, ngramScore, readSafetensors } from "./model.js";
import { Tokenizer } from "./tokenizer.js";

const ROOT = new URL("../models/", import.meta.url), END = 0; // <|endoftext|>
const policies = {}; // name → GPT2; "reference" is the one without an adapter
let config, tokenizer, classifier, classifierTokenizer, positive, judge, texts, noise;

/** Fetch a file → its bytes, reporting how many came. */
async function file(path, report) {
  const response = await fetch(new URL(path, ROOT)), parts = [];
  if (!response.ok) throw new Error(`The server has no ${path} (status ${response.status}).`);
  const reader = response.body.getReader();
  for (let part; !(part = await reader.read()).done;) report(parts.at(parts.push(part.value) - 1).length);
  return new Blob(parts).arrayBuffer();
}
const json = async (path, report) => JSON.parse(new TextDecoder().decode(await file(path, report)));
const tensors = async (path, report) => readSafetensors(await file(path, report));

/** Fill `noise` (vocabulary) with Gumbel noise: −log(−log u), u from mulberry32 with this seed. */
function drawNoise(stream, position) {
  let state = Math.imul(stream * 4096 + position + 1, 0x9e3779b1);
  for (let i = 0; i < noise.length; i++) {
    state = (state + 0x6d2b79f5) | 0;
    let x = Math.imul(state ^ (state >>> 15), 1 | state);
    x = (x + Math.imul(x ^ (x >>> 7), 61 | x)) ^ x;
    noise[i] = -Math.log(-Math.log((((x ^ (x >>> 14)) >>> 0) + 0.5) / 2 ** 32));
  }
}

/** argmax of logits + noise is a sample of softmax(logits). With the same noise, two policies choose
 *  the same token wherever they roughly agree. */
function sample(logits) {
  let best = 0;
  for (let i = 1; i < logits.length; i++) if (logits[i] + noise[i] > logits[best] + noise[best]) best = i;
  return best;
}

/** A prompt's last 180 ids, or the end of a text where there is none: a model takes 256 tokens. */
const idsOf = (prompt) => (prompt === "" ? [END] : tokenizer.encode(prompt).slice(-180));

/** Read ids with a policy → the last hidden state (width), and the cache. */
function readAll(policy, ids) {
  const cache = policy.cache();
  return { policy, cache, state: ids.map((id) => policy.read(id, cache)).at(-1) };
}

/** The POSITIVE logit of both judges. Of a long text the classifier reads the end. */
function scores(text) {
  const ids = classifierTokenizer.encode(text).slice(1 - config.max_position_embeddings);
  return [classifier.logits([classifierTokenizer.special.get("[CLS]"), ...ids])[positive], ngramScore(text, judge)];
}

const tasks = {
  /** Fetch the reference and the judges. */
  async load(report) {
    const [gpt2, bert, ngram] = ["gpt2-imdb-mini", "distilbert-imdb-mini", "ngram-imdb-judge"];
    const small = [gpt2, bert].flatMap((name) => [`${name}/config.json`, `${name}/tokenizer.json`]);
    const weights = [gpt2, bert, ngram].map((name) => tensors(`${name}/model.safetensors`, report));
    const [gptConfig, words, bertConfig, bertWords] = await Promise.all(small.map((name) => json(name, report)));
    const [base, judgeWeights, ngrams] = await Promise.all(weights);
    policies.reference = new GPT2(base, gptConfig);
    [config, classifier, judge] = [bertConfig, new DistilBERT(judgeWeights, bertConfig, 1e-12), ngrams];
    [tokenizer, classifierTokenizer] = [new Tokenizer(words), new Tokenizer(bertWords)];
    positive = Object.values(config.id2label).indexOf("POSITIVE");
    noise = new Float64Array(gptConfig.vocab_size);
  },

  /** Fetch an adapter and merge it, the first time that its policy is asked for. */
  async policy(report, name) {
    if (policies[name]) return;
    const settings = await json(`imdb-live-policies/${name}/adapter_config.json`, report);
    const matrices = await tensors(`imdb-live-policies/${name}/adapter_model.safetensors`, report);
    policies[name] = policies.reference.adapted(matrices, settings);
  },

  /** Start texts after one prompt, one per row of `sides`: its stream of noise, and the names of the
   *  models that read it. The last of them writes it. */
  begin(report, prompt, sides) {
    const ids = idsOf(prompt);
    texts = sides.map(([stream, ...names]) => ({ ids: [...ids], from: ids.length, stream,
      readers: names.map((name) => readAll(policies[name], ids)) }));
    return tokenizer.decode(ids);
  },

  /** One token more for each text → [{token, text, logps: one per model, done}]; a text that has ended gets no token. */
  step() {
    return texts.map((one) => {
      if (one.done) return { ...one.last, token: "", logps: null };
      const rows = one.readers.map((reader) => reader.policy.logits(reader.state));
      drawNoise(one.stream, one.ids.length - one.from);
      const id = sample(rows.at(-1)), length = one.ids.push(id);
      one.done = id === END || length === policies.reference.config.n_positions;
      for (const reader of one.done ? [] : one.readers) reader.state = reader.policy.read(id, reader.cache);
      const logps = rows.map((row) => row[id] - logSumExp(row)), [token, text] = [[id], one.ids].map((ids) => tokenizer.decode(ids));
      return (one.last = { token, text, logps, done: one.done });
    });
  },

  score: (report, given) => given.map(scores),

  /** For tests: the next token's logits (vocabulary), and `count` draws of its id. */
  logits(report, text, name, count) {
    const logits = policies[name].logits(readAll(policies[name], idsOf(text)).state);
    return { logits, draws: Array.from({ length: count }, (_, i) => (drawNoise(i, 0), sample(logits))) };
  },
};

self.onmessage = async ({ data: [id, name, ...given] }) => {
  try {
    postMessage([id, "result", await tasks[name]((bytes) => postMessage([id, "bytes", bytes]), ...given)]);
  } catch (error) {
    postMessage([id, "error", error.message]);
  }
};
