#!/usr/bin/env python3
"""Writes pieces.gguf: a tokenizer of SentencePiece, and the ids that SentencePiece gives texts.

    pip install gguf==0.19.0 sentencepiece==0.2.3 && python pieces.py

Pieces are trained as Llama's were: pairs that are merged, bytes for what is no piece, spaces kept, a space before texts.
"""

import io
from pathlib import Path

import gguf
import sentencepiece

HERE = Path(__file__).parent
TEXTS = [
    "The borrow checker", "fn main() { println!(\"{}\", 12345); }", "  two spaces,  and more   ", "", " ", "a",
    "Grüße, 世界! 🦀", "tabs\tand\nlines\n\n", "▁", "unwrap_or_else(|e| panic!(\"{e}\"))", "ownership ownership",
]


def main() -> None:
    model = io.BytesIO()
    with (HERE / "../models/ferris/eval/text.txt").open() as text:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=text, model_writer=model, vocab_size=700, model_type="bpe", byte_fallback=True,
            normalization_rule_name="identity", remove_extra_whitespaces=False, character_coverage=0.999,
            allow_whitespace_only_pieces=True, split_digits=True, minloglevel=2,
        )
    pieces = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    kinds = gguf.TokenType
    kind = lambda i: (kinds.UNKNOWN if pieces.is_unknown(i) else kinds.CONTROL if pieces.is_control(i)
                      else kinds.BYTE if pieces.is_byte(i) else kinds.NORMAL)
    ids = range(pieces.vocab_size())
    writer = gguf.GGUFWriter(HERE / "pieces.gguf", "llama")
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([pieces.id_to_piece(i) for i in ids])
    writer.add_token_scores([pieces.get_score(i) for i in ids])
    writer.add_token_types([kind(i) for i in ids])
    writer.add_bos_token_id(pieces.bos_id())
    writer.add_eos_token_id(pieces.eos_id())
    # What the test wants: texts, and ids between commas.
    writer.add_array("sample.texts", TEXTS)
    writer.add_array("sample.ids", [",".join(map(str, pieces.encode(text))) for text in TEXTS])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


main()
