// The networks of the page: weights in float32, sums in float64. Matrices are flat arrays, row by row.

/** A safetensors file with BF16 or F16 → {name: Float32Array}. */
export function readSafetensors(buffer) {
  const start = 8 + Number(new DataView(buffer).getBigUint64(0, true));
  const { __metadata__, ...header } = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 8, start - 8)));
  return Object.fromEntries(Object.entries(header).map(([name, { dtype, data_offsets: [from, to] }]) => {
    const halves = new Uint16Array(buffer.slice(start + from, start + to));
    if (dtype === "F16") return [name, new Float32Array(halves).map(fromFloat16)];
    return [name, new Float32Array(new Uint32Array(halves).map((half) => half << 16).buffer)]; // BF16: the upper half
  }));
}

function fromFloat16(half) {
  const exponent = (half >> 10) & 31, fraction = (half & 1023) / 1024;
  return (half >> 15 ? -1 : 1) * (exponent ? (1 + fraction) * 2 ** (exponent - 15) : fraction * 2 ** -14);
}

/** weight (outputs × inputs) · x (inputs) + bias (outputs) → (outputs); four outputs at a time, for speed. */
function linear(x, weight, bias) {
  const inputs = x.length, outputs = bias.length, sums = new Float64Array(outputs + 3);
  const start = (output) => Math.min(output, outputs - 1) * inputs; // of its row; the last row again past the end
  sums.set(bias);
  for (let j = 0; j < outputs; j += 4) {
    const a = start(j), b = start(j + 1), c = start(j + 2), d = start(j + 3);
    let p = 0, q = 0, r = 0, s = 0;
    for (let i = 0; i < inputs; i++) {
      const value = x[i];
      p += value * weight[a + i];
      q += value * weight[b + i];
      r += value * weight[c + i];
      s += value * weight[d + i];
    }
    sums[j] += p; sums[j + 1] += q; sums[j + 2] += r; sums[j + 3] += s;
  }
  return sums.subarray(0, outputs);
}

const add = (x, y) => x.map((value, i) => value + y[i]);
const geluTanh = (x) => 0.5 * x * (1 + Math.tanh(Math.sqrt(2 / Math.PI) * (x + 0.044715 * x * x * x)));

/** x · Φ(x), with erfc to 1.2e-7: Numerical Recipes, section 6.2. */
function gelu(x) {
  const z = Math.abs(x) / Math.SQRT2, t = 1 / (1 + z / 2);
  const series = [0.17087277, -0.82215223, 1.48851587, -1.13520398, 0.27886807, -0.18628806, 0.09678418,
    0.37409196, 1.00002368, -1.26551223].reduce((sum, coefficient) => sum * t + coefficient);
  const tail = (t * Math.exp(series - z * z)) / 2; // Φ(−|x|)
  return x * (x < 0 ? tail : 1 - tail);
}

/** Logits → the logarithm of the sum of their exponentials. */
export function logSumExp(logits) {
  const most = logits.reduce((one, other) => Math.max(one, other));
  return most + Math.log(logits.reduce((total, logit) => total + Math.exp(logit - most), 0));
}

/** One query (width) on keys and values (length × width), head by head → (width). */
function attend(query, keys, values, length, heads) {
  const width = query.length, size = width / heads, out = new Float64Array(width), scores = new Float64Array(length);
  for (let from = 0; from < width; from += size) {
    for (let t = 0; t < length; t++) {
      scores[t] = 0;
      for (let i = from; i < from + size; i++) scores[t] += (query[i] * keys[t * width + i]) / Math.sqrt(size);
    }
    const total = logSumExp(scores);
    for (let t = 0; t < length; t++) {
      const share = Math.exp(scores[t] - total);
      for (let i = from; i < from + size; i++) out[i] += share * values[t * width + i];
    }
  }
  return out;
}

class Network {
  constructor(weights, config, epsilon) {
    Object.assign(this, { weights, config, epsilon });
  }

  /** A linear layer by its name: x (inputs) → (outputs). */
  linear(x, name) {
    return linear(x, this.weights[`${name}.weight`], this.weights[`${name}.bias`]);
  }

  /** A layer norm by its name: x (width) → (width). */
  norm(x, name) {
    const weight = this.weights[`${name}.weight`], bias = this.weights[`${name}.bias`];
    const mean = x.reduce((sum, value) => sum + value) / x.length;
    const variance = x.reduce((sum, value) => sum + (value - mean) ** 2, 0) / x.length;
    return x.map((value, i) => ((value - mean) / Math.sqrt(variance + this.epsilon)) * weight[i] + bias[i]);
  }

  /** Row i of an embedding (rows × width) → (width). */
  row(name, i, width) {
    return Float64Array.from(this.weights[`${name}.weight`].subarray(i * width, (i + 1) * width));
  }
}

export class GPT2 extends Network {
  /** The weights of its linear layers, which GPT-2 keeps as (inputs × outputs), are transposed here. */
  constructor(weights, config) {
    super({ ...weights }, config, config.layer_norm_epsilon);
    for (const name of Object.keys(weights).filter((key) => /\.c_\w+\.weight/.test(key))) {
      const W = weights[name], outputs = weights[name.replace("weight", "bias")].length, inputs = W.length / outputs;
      this.weights[name] = W.map((_, place) => W[(place % inputs) * outputs + Math.floor(place / inputs)]);
    }
  }

  /** The same model with a LoRA adapter merged in: W (out × in) += alpha / rank · B (out × rank) · A (rank × in). */
  adapted(tensors, { r: rank, lora_alpha: alpha }) {
    const policy = Object.assign(Object.create(GPT2.prototype), this, { weights: { ...this.weights } });
    for (const name of Object.keys(tensors).filter((key) => key.includes("lora_A"))) {
      const A = tensors[name], B = tensors[name.replace("lora_A", "lora_B")], inputs = A.length / rank;
      const target = name.replace("base_model.model.", "").replace("lora_A.", "");
      policy.weights[target] = this.weights[target].map((value, place) => {
        const output = Math.floor(place / inputs), input = place % inputs;
        for (let k = 0; k < rank; k++) value += (alpha / rank) * B[output * rank + k] * A[k * inputs + input];
        return value;
      });
    }
    return policy;
  }

  /** Keys and values of the tokens so far, (positions × width) per layer. */
  cache() {
    const { n_layer: length, n_positions: positions, n_embd: width } = this.config;
    const empty = () => Array.from({ length }, () => new Float32Array(positions * width));
    return { keys: empty(), values: empty(), length: 0 };
  }

  /** Append a token to the cache → its last hidden state (width), after the final layer norm. */
  read(token, cache) {
    const { n_embd: width, n_head: heads, n_layer: layers } = this.config, at = cache.length++;
    let x = add(this.row("transformer.wte", token, width), this.row("transformer.wpe", at, width));
    for (let layer = 0; layer < layers; layer++) {
      const h = `transformer.h.${layer}`, keys = cache.keys[layer], values = cache.values[layer];
      const qkv = this.linear(this.norm(x, `${h}.ln_1`), `${h}.attn.c_attn`); // (3 · width): query, key, value
      keys.set(qkv.subarray(width, 2 * width), at * width);
      values.set(qkv.subarray(2 * width), at * width);
      x = add(x, this.linear(attend(qkv.subarray(0, width), keys, values, at + 1, heads), `${h}.attn.c_proj`));
      const inner = this.linear(this.norm(x, `${h}.ln_2`), `${h}.mlp.c_fc`).map(geluTanh); // (4 · width)
      x = add(x, this.linear(inner, `${h}.mlp.c_proj`));
    }
    return this.norm(x, "transformer.ln_f");
  }

  /** A last hidden state (width) → logits (vocabulary): its products with the tokens' embeddings. */
  logits(state) {
    return linear(state, this.weights["transformer.wte.weight"], new Float32Array(this.config.vocab_size));
  }
}

export class DistilBERT extends Network {
  /** Ids (length), with [CLS] first → logits (labels). The head reads the state of [CLS]. */
  logits(ids) {
    const { dim: width, n_heads: heads, n_layers: layers } = this.config, e = "distilbert.embeddings";
    const embed = (id, i) => add(this.row(`${e}.word_embeddings`, id, width), this.row(`${e}.position_embeddings`, i, width));
    let states = ids.map((id, i) => this.norm(embed(id, i), `${e}.LayerNorm`)); // length × (width)
    for (let layer = 0; layer < layers; layer++) {
      const t = `distilbert.transformer.layer.${layer}`;
      const [keys, values] = ["k_lin", "v_lin"].map((name) => // (length × width) each
        Float64Array.from(states.flatMap((x) => [...this.linear(x, `${t}.attention.${name}`)])));
      if (layer === layers - 1) states = states.slice(0, 1); // only [CLS] is read after the last layer
      states = states.map((x) => {
        const seen = attend(this.linear(x, `${t}.attention.q_lin`), keys, values, ids.length, heads);
        const y = this.norm(add(x, this.linear(seen, `${t}.attention.out_lin`)), `${t}.sa_layer_norm`);
        const inner = this.linear(y, `${t}.ffn.lin1`).map(gelu); // (4 · width)
        return this.norm(add(y, this.linear(inner, `${t}.ffn.lin2`)), `${t}.output_layer_norm`);
      });
    }
    return this.linear(this.linear(states[0], "pre_classifier").map((value) => Math.max(0, value)), "classifier");
  }
}

/** The CRC-32 of a text's bytes, as in zlib. */
function crc32(text) {
  let crc = -1;
  for (const byte of new TextEncoder().encode(text)) {
    crc ^= byte;
    for (let bit = 0; bit < 8; bit++) crc = (crc >>> 1) ^ (crc & 1 ? 0xedb88320 : 0);
  }
  return ~crc >>> 0;
}

/** The second judge: a bias plus a weight for each different word and word pair. */
export function ngramScore(text, { weight, bias }) {
  const words = text.toLowerCase().match(/[a-z0-9']+|[!?]/g) ?? [];
  const pairs = words.slice(1).map((word, i) => `${words[i]} ${word}`);
  const places = new Set([...words, ...pairs].map((ngram) => crc32(ngram) % weight.length));
  return [...places].reduce((sum, place) => sum + weight[place], bias[0]);
}
