"""Writes the prompts that transformers makes of conversations with each template of this folder.

    python write.py        # rewrites FAMILY.json for every FAMILY.jinja, from conversations.json

Wants `transformers` and `jinja2` (the versions are written down in each file). Nothing is downloaded.
"""

import json
import pathlib

import jinja2
import transformers
from transformers.utils import chat_template_utils

HERE = pathlib.Path(__file__).parent
# Special tokens of the models, as far as their templates name them.
TOKENS = {
    "allenai-OLMoE-1B-7B-0125-Instruct": {"bos_token": "|||IP_ADDRESS|||", "eos_token": "|||IP_ADDRESS|||"},
    "allenai-OLMoE-1B-7B-0924-Instruct": {"bos_token": "|||IP_ADDRESS|||", "eos_token": "|||IP_ADDRESS|||"},
    "deepseek-ai-DeepSeek-V2-Lite-Chat": {"bos_token": "<｜begin▁of▁sentence｜>", "eos_token": "<｜end▁of▁sentence｜>"},
    "deepseek-ai-DeepSeek-V3.1": {"bos_token": "<｜begin▁of▁sentence｜>", "eos_token": "<｜end▁of▁sentence｜>"},
    "microsoft-Phi-3.5-MoE-instruct": {"bos_token": "<s>", "eos_token": "<|endoftext|>"},
    "microsoft-Phi-tiny-MoE-instruct": {"bos_token": "<s>", "eos_token": "<|endoftext|>"},
    "mistralai-Mistral-Nemo-Instruct-2407": {"bos_token": "<s>", "eos_token": "</s>"},
    "mistralai-Mixtral-8x22B-Instruct-v0.1": {"bos_token": "<s>", "eos_token": "</s>"},
    "mistralai-Mixtral-8x7B-Instruct-v0.1": {"bos_token": "<s>", "eos_token": "</s>"},
}


class Clock(chat_template_utils.datetime):
    """A day that stays: gpt-oss writes the date."""

    @classmethod
    def now(cls, tz=None):
        return cls(2025, 8, 5, 12, 0, 0)


def main():
    chat_template_utils.datetime = Clock
    conversations = json.loads((HERE / "conversations.json").read_text())
    for path in sorted(HERE.glob("*.jinja")):
        template = path.read_text()
        tokens = TOKENS.get(path.stem, {})
        cases = []
        for case in conversations:
            case = dict(case)
            name, messages = case.pop("name"), case.pop("messages")
            try:
                rendered, _ = chat_template_utils.render_jinja_template(
                    [messages], chat_template=template, **case, **tokens
                )
                cases.append({"name": name, "prompt": rendered[0]})
            except (jinja2.exceptions.TemplateError, TypeError, ValueError) as e:
                cases.append({"name": name, "refused": f"{type(e).__name__}: {e}"})
        whole = {
            "transformers": transformers.__version__,
            "jinja2": jinja2.__version__,
            "now": "2025-08-05T12:00:00",
            "tokens": tokens,
            "cases": cases,
        }
        text = json.dumps(whole, ensure_ascii=False, indent=1)
        path.with_suffix(".json").write_text(text + "\n")
        print(path.stem, sum("prompt" in c for c in cases), "rendered,", sum("refused" in c for c in cases), "refused")


if __name__ == "__main__":
    main()
