//! Rules to split texts before bytes are merged, by the names in `tokenizer.ggml.pre`. The rules are those of
//! the models' own tokenizers.

use serde_json::{Value, json};

/// A rule to split texts.
pub(super) struct Split {
    /// Its names in files.
    names: &'static [&'static str],
    /// Whether characters are composed first (NFC).
    pub(super) composed: bool,
    /// Whether a word that is a token is used without merging.
    pub(super) whole_words: bool,
    /// Default for adding the first token before texts.
    pub(super) begins: bool,
    /// Whether every digit is split off.
    digits: bool,
    /// Regular expressions, each applied to the results of the one before; an empty list means GPT-2's own.
    expressions: &'static [&'static str],
}

/// Words with a leading character, single digits, runs of signs, lines.
const QWEN: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// The same with up to three digits together.
const THREE_DIGITS: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Words, split where a lower-case letter is followed by an upper-case one.
const O200K: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// Qwen's expression, with combining marks as parts of words.
const MARKED: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Words, split where a lower-case letter is followed by an upper-case one, and single digits. English
/// endings are not split off.
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Words with the spaces between them.
const SPACED: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+";

/// Chinese characters by themselves, other words as in [`O200K`].
const KIMI: &str = r"\p{Han}+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Words with a leading character, signs with letters after them, runs of signs, lines.
const SIGNED: &str = r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##;

const PLAIN: Split =
    Split { names: &[], composed: false, whole_words: false, begins: false, digits: false, expressions: &[] };

/// Every known rule.
static SPLITS: [Split; 15] = [
    Split { names: &["gpt-2", "gpt2"], ..PLAIN },
    Split { names: &["olmo"], composed: true, ..PLAIN },
    Split { names: &["starcoder", "refact", "command-r", "smollm"], digits: true, ..PLAIN },
    Split { names: &["qwen2", "deepseek-r1-qwen"], composed: true, expressions: &[QWEN], ..PLAIN },
    Split { names: &["hunyuan", "solar-open"], expressions: &[QWEN], ..PLAIN },
    Split { names: &["qwen35"], composed: true, expressions: &[MARKED], ..PLAIN },
    Split { names: &["glm4", "chatglm-bpe", "dbrx", "smaug-bpe"], expressions: &[THREE_DIGITS], ..PLAIN },
    Split {
        names: &["llama-bpe", "llama3", "llama-v3", "lfm2", "pixtral"],
        whole_words: true,
        begins: true,
        expressions: &[THREE_DIGITS],
        ..PLAIN
    },
    Split { names: &["gpt-4o", "llama4", "minimax-m2"], expressions: &[O200K], ..PLAIN },
    Split { names: &["tekken"], whole_words: true, begins: true, expressions: &[TEKKEN], ..PLAIN },
    Split { names: &["kimi-k2"], expressions: &[KIMI], ..PLAIN },
    Split { names: &["exaone-moe"], expressions: &[SPACED], ..PLAIN },
    // Only letters with a case count: the tokenizer lists them one by one.
    Split {
        names: &["deepseek-llm"],
        digits: true,
        expressions: &[
            r"[\r\n]",
            r"\s?[\p{Lu}\p{Ll}\p{Lt}]+",
            r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
            r"\s+$",
            r"[一-龥ࠀ-一가-퟿]+",
        ],
        ..PLAIN
    },
    Split {
        names: &["deepseek-v3"], expressions: &[r"\p{N}{1,3}", r"[一-龥぀-ゟ゠-ヿ]+", SIGNED], ..PLAIN
    },
    Split {
        names: &["afmoe"],
        expressions: &[
            // Digits in groups of three from the last one on: first whole runs, since a search from each group to
            // the end of its run would take time by the square of its length.
            r"\p{N}+",
            r"^\p{N}{1,2}(?=(?:\p{N}{3})+$)|\p{N}{3}",
            // Scripts without spaces between words: Han, kana, Thai, Lao, Khmer, Burmese, Hangul.
            r"[\x{4E00}-\x{9FFF}\x{3400}-\x{4DBF}\x{F900}-\x{FAFF}\x{3040}-\x{30FF}\x{FF65}-\x{FF9F}\x{2F00}-\x{2FDF}\x{E40}-\x{EFF}\x{1780}-\x{17FF}\x{1000}-\x{109F}\x{AA60}-\x{AA7F}\x{A9E0}-\x{A9FF}\x{AC00}-\x{D7AF}\x{1100}-\x{11FF}]+",
            SIGNED,
        ],
        ..PLAIN
    },
];

/// Returns the rule of a name.
pub(super) fn find(name: &str) -> Option<&'static Split> {
    SPLITS.iter().find(|split| split.names.contains(&name))
}

/// Every name.
pub(super) fn names() -> Vec<&'static str> {
    SPLITS.iter().flat_map(|split| split.names).copied().collect()
}

impl Split {
    /// Returns the `pre_tokenizer` of a `tokenizer.json`.
    pub(super) fn json(&self) -> Value {
        let isolated = |regex: &&str| json!({"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": false});
        let mut all: Vec<Value> = self.expressions.iter().map(isolated).collect();
        if self.digits {
            all.push(json!({"type": "Digits", "individual_digits": true}));
        }
        all.push(json!({
            "type": "ByteLevel",
            "add_prefix_space": false,
            "trim_offsets": true,
            "use_regex": self.expressions.is_empty(),
        }));
        json!({"type": "Sequence", "pretokenizers": all})
    }
}
