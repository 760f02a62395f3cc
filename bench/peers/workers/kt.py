"""kt-kernel: the experts of one layer. Arguments: checkpoint, threads, context, format.

The router is computed by torch beforehand and is not measured."""

import sys
from pathlib import Path

from common import serve, timed


class Kt:
    def __init__(self, path, threads, context, fmt):
        import json

        import torch
        from safetensors import safe_open

        torch.set_num_threads(threads)
        self.torch, self.layer = torch, {}
        config = json.loads((Path(path) / "config.json").read_text())
        self.k, self.hidden, self.experts = config["num_experts_per_tok"], config["hidden_size"], config["num_experts"]
        self.eps = config["rms_norm_eps"]
        for file in sorted(Path(path).glob("model*.safetensors")):
            with safe_open(file, "pt") as tensors:
                self.layer |= {name: tensors.get_tensor(name) for name in tensors.keys()}
        self.infer = self.pool(threads)
        self.moe = self.open(context, config["intermediate_size"], fmt)

    def pool(self, threads):
        """One pool of threads, as `BaseMoEWrapper` makes it. The wrappers themselves want a CUDA driver."""
        from kt_kernel import kt_kernel_ext as ext

        config = ext.WorkerPoolConfig()
        config.subpool_count, config.subpool_numa_map, config.subpool_thread_count = 1, [0], [threads]
        return ext.CPUInfer(config)

    def open(self, context, inner, fmt):
        """The layer's experts: bf16 as they are (`BF16`), or quantised while they are loaded (`AMXINT8`)."""
        import kt_kernel_ext.moe as ext

        self.on_gpu = self.torch.zeros(self.experts, dtype=self.torch.bool)
        config = ext.MOEConfig(self.experts, self.k, self.hidden, inner, self.on_gpu.data_ptr())
        config.layer_idx, config.pool, config.max_len = 0, self.infer.backend_, context
        self.kept = [self.stack(name) for name in ("gate_proj", "up_proj", "down_proj")]
        if fmt == "q8":
            config.gate_proj, config.up_proj, config.down_proj = (t.data_ptr() for t in self.kept)
            moe = ext.AMXInt8_MOE(config)
        else:
            pointers = [[[t[e].data_ptr() for e in range(self.experts)]] for t in self.kept]
            config.gate_projs, config.up_projs, config.down_projs = pointers
            config.gate_scales = config.up_scales = config.down_scales = [[0] * self.experts]
            moe = getattr(ext, "AMXBF16_MOE", None) or ext.AVX2BF16_MOE
            moe = moe(config)
        self.order = self.torch.arange(self.experts, dtype=self.torch.int64)
        self.infer.submit(moe.load_weights_task(self.order.data_ptr()))
        self.infer.sync()
        return moe

    def stack(self, name):
        at = "model.layers.0.mlp.experts.{}.{}.weight"
        return self.torch.stack([self.layer[at.format(e, name)] for e in range(self.experts)]).contiguous()

    def inputs(self, ids):
        """Input of the experts, their indexes and weights, for ids of the probe (attention adds nothing)."""
        t, at = self.torch, self.layer
        x = at["model.embed_tokens.weight"][t.tensor(ids)].float()
        x = x * t.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        x = x * at["model.layers.0.post_attention_layernorm.weight"].float()
        scores = t.softmax(x @ at["model.layers.0.mlp.gate.weight"].float().T, dim=-1)
        weights, experts = t.topk(scores, self.k, dim=-1)
        return x.to(t.bfloat16).contiguous(), experts.to(t.int64).contiguous(), weights.contiguous()

    def forward(self, x, experts, weights):
        out = self.torch.zeros_like(x)
        rows = self.torch.tensor([x.shape[0]], dtype=self.torch.int32)
        pointers = [t.data_ptr() for t in (experts, weights, x, out)]

        def work():
            self.infer.submit(self.moe.forward_task(rows.data_ptr(), self.k, *pointers, False))
            self.infer.sync()

        return timed(work)[0], out

    def layer_time(self, ids):
        return {"seconds": self.forward(*self.inputs(ids))[0]}

    def output(self, ids, out):
        import numpy as np

        np.save(out, self.forward(*self.inputs(ids))[1].float().numpy())
        return {"out": out}

    def version(self):
        import importlib.metadata

        import kt_kernel

        return {"version": f"{importlib.metadata.version('kt-kernel')} ({kt_kernel.__cpu_variant__})"}


if __name__ == "__main__":
    path, threads, context, fmt = sys.argv[1:]
    serve(Kt(path, int(threads), int(context), fmt))
