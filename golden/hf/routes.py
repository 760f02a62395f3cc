#!/usr/bin/env python3
"""Writes routes.safetensors of checkpoints: the experts that transformers' routers choose for the prompt.

    pip install torch transformers==5.24.0 && python routes.py FOLDER ...

The choices are what the module of the experts is called with, or, where it is not called with choices (Llama 4), the largest of the
router's results. A run whose logits are not those of expected.safetensors fails. `AutoModelForCausalLM` does not read the folders
mistral4, step3p7 and longcat_flash; their files are of the run that wrote expected.safetensors.
"""

import re
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

EXPERTS = re.compile(r"layers\.(\d+)\..*experts$|layers\.(\d+)\.experts$")
ROUTER = re.compile(r"layers\.(\d+)\..*router$")


def routes(folder: Path) -> dict[str, torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    want, seen, largest = load_file(folder / "expected.safetensors"), {}, {}

    def choices(layer):
        def hook(_, args, kwargs):
            for t in [*args, *kwargs.values()]:
                if torch.is_tensor(t) and t.dtype == torch.int64:
                    seen[layer] = t
        return hook

    def best(layer):
        def hook(_, args, out):
            largest[layer] = (out[0] if isinstance(out, tuple) else out).argmax(-1)
        return hook

    for name, module in model.named_modules():
        if found := EXPERTS.search(name):
            module.register_forward_pre_hook(choices(int(found[1] or found[2])), with_kwargs=True)
        elif found := ROUTER.search(name):
            module.register_forward_hook(best(int(found[1])))
    with torch.no_grad():
        logits = model(want["input_ids"][None].long()).logits[0]
    off = (logits - want["logits"]).abs().max().item()
    assert off < 1e-4, f"{folder.name}: logits differ by {off}"
    n = len(want["input_ids"])
    return {f"layers.{l}": t.reshape(n, -1).to(torch.int32).contiguous() for l, t in (seen or largest).items()}


def main() -> None:
    torch.set_num_threads(1)
    for folder in map(Path, sys.argv[1:]):
        save_file(routes(folder), folder / "routes.safetensors")


main()
