"""transformers on torch: bf16, experts by grouped matrix products. Arguments: checkpoint, threads, context, format."""

import sys

from common import prompt_ids, serve, timed


class Transformers:
    def __init__(self, path, threads, _context, _fmt):
        import torch
        import transformers

        torch.set_num_threads(threads)
        torch.set_grad_enabled(False)
        self.torch, self.library = torch, transformers
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.bfloat16, experts_implementation="grouped_mm", attn_implementation="sdpa"
        ).eval()
        self.vocab = self.model.config.vocab_size

    def ids(self, ids):
        return self.torch.tensor([ids], dtype=self.torch.long)

    def time(self, prompt, gen):
        ids = prompt_ids(0, prompt, self.vocab)
        cache = self.library.DynamicCache(config=self.model.config)
        step = lambda part: self.model(self.ids(part), past_key_values=cache, use_cache=True, logits_to_keep=1)
        prefill, _ = timed(lambda: step(ids))
        decode, _ = timed(lambda: [step([ids[i % prompt]]) for i in range(gen)])
        return {"prefill": prompt / prefill, "decode": gen / decode}

    def output(self, ids, out):
        """Of the first layer's experts: bf16 all along, the residual would hide them."""
        import numpy as np

        found = []
        hook = self.model.model.layers[0].mlp.register_forward_hook(lambda _m, _in, result: found.append(result))
        self.model(self.ids(ids))
        hook.remove()
        result = found[0][0] if isinstance(found[0], tuple) else found[0]
        np.save(out, result.reshape(len(ids), -1).float().numpy())
        return {"out": out}

    def version(self):
        return {"version": f"{self.library.__version__}, torch {self.torch.__version__}"}


if __name__ == "__main__":
    path, threads, context, fmt = sys.argv[1:]
    serve(Transformers(path, int(threads), int(context), fmt))
