// Byte-level BPE, as in GPT-2: text → bytes → letters that stand for bytes → merged pieces → ids.
const SPLIT = /'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\p{White_Space}\p{L}\p{N}]+|\p{White_Space}+(?!\P{White_Space})|\p{White_Space}+/gu;
const utf8 = (text) => [...new TextEncoder().encode(text)];

// 256 letters, one for each byte: printable bytes stand for themselves, others for U+0100 and up.
let next = 256;
const isPrintable = (byte) => (byte > 32 && byte < 127) || (byte > 160 && byte !== 173);
const LETTERS = Array.from({ length: 256 }, (_, byte) => String.fromCodePoint(isPrintable(byte) ? byte : next++));

export class Tokenizer {
  /** Takes the contents of a `tokenizer.json` of the library tokenizers, with a ByteLevel BPE. */
  constructor({ model, added_tokens: added }) {
    this.ids = model.vocab;
    this.ranks = new Map(model.merges.map((pair, rank) => [pair.join(" "), rank]));
    this.special = new Map(added.map(({ content, id }) => [content, id]));
    this.atSpecial = new RegExp(`(${added.map(({ content }) => content.replace(/[[\]|]/g, "\\$&")).join("|")})`);
    const byteOf = Object.fromEntries(LETTERS.map((letter, byte) => [letter, byte]));
    this.bytes = []; // id → its bytes
    for (const [piece, id] of Object.entries(this.ids)) this.bytes[id] = [...piece].map((letter) => byteOf[letter]);
    for (const [content, id] of this.special) this.bytes[id] = utf8(content);
  }

  /** Text → ids. A special token's name in the text becomes that token, as in transformers. */
  encode(text) {
    const words = (part) => [...part.matchAll(SPLIT)].flatMap(([word]) => this.merge(word));
    return text.split(this.atSpecial).flatMap((part) => this.special.get(part) ?? words(part));
  }

  /** The ids of one word: merge the adjacent pair with the lowest rank until no pair has one. */
  merge(word) {
    const parts = utf8(word).map((byte) => LETTERS[byte]);
    for (;;) {
      const ranks = parts.slice(1).map((part, i) => this.ranks.get(`${parts[i]} ${part}`) ?? Infinity);
      const best = Math.min(...ranks), place = ranks.indexOf(best);
      if (best === Infinity) return parts.map((part) => this.ids[part]);
      parts.splice(place, 2, parts[place] + parts[place + 1]);
    }
  }

  /** Ids → text. A character whose bytes are not all there is shown as U+FFFD. */
  decode(ids) {
    return new TextDecoder().decode(new Uint8Array(ids.flatMap((id) => this.bytes[id])));
  }
}
