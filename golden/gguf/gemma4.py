#!/usr/bin/env python3
"""Writes gemma4.gguf: a small tokenizer of Gemma's kind, and the ids that transformers gives texts.

    pip install gguf==0.19.0 transformers==5.24.0 && python gemma4.py

Pairs of characters are trained on ferris' text, a line and a newline run apart from each other, as in Gemma's vocabulary.
"""

import json
from pathlib import Path

import gguf
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import GemmaTokenizer

HERE = Path(__file__).parent
SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
BYTES = [f"<0x{b:02X}>" for b in range(256)]
TEXTS = [
    "The borrow checker", "fn main() { println!(\"{}\", 12345); }", "  two spaces,  and more   ", "", " ", "a",
    "Grüße, 世界! 🦀", "tabs\tand\nlines\n\n", "\n\n\n\n\nfive", "▁", "unwrap_or_else(|e| panic!(\"{e}\"))", "ownership ownership",
]


def main() -> None:
    trained = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n+|▁*[^\n▁]+|▁+"), "isolated")
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=SPECIAL + BYTES, show_progress=False)
    text = (HERE / "../models/ferris/eval/text.txt").read_text()
    trained.train_from_iterator([text, "\n" * 9 + "a" + "\n" * 6], trainer)
    vocab = trained.get_vocab()
    merges = [tuple(pair) for pair in json.loads(trained.to_str())["model"]["merges"]]
    reference = GemmaTokenizer(vocab=vocab, merges=merges)
    kinds = gguf.TokenType
    kind = lambda token: (kinds.UNKNOWN if token == "<unk>" else kinds.CONTROL if token in SPECIAL
                          else kinds.BYTE if token in BYTES else kinds.NORMAL)
    tokens = sorted(vocab, key=vocab.get)
    writer = gguf.GGUFWriter(HERE / "gemma4.gguf", "gemma4")
    writer.add_tokenizer_model("gemma4")
    writer.add_token_list(tokens)
    writer.add_token_scores([-1000.0] * len(tokens))
    writer.add_token_types([kind(token) for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(vocab["<bos>"])
    writer.add_eos_token_id(vocab["<eos>"])
    # What the test wants: texts, and ids between commas.
    writer.add_array("sample.texts", TEXTS)
    encode = lambda text: reference.encode(text, add_special_tokens=False)
    writer.add_array("sample.ids", [",".join(map(str, encode(text))) for text in TEXTS])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


main()
