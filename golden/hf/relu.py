"""Writes the tiny checkpoints of the families with ReLU experts and networks, and their reference outputs.

The reference is plain torch, written from the equations that README.md names; it shares no code with moec. `--check`
compares it with transformers, where a class of transformers computes the same with another activation.

    python golden/hf/relu.py [--check]
"""

import argparse
import json
import pathlib

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

HERE = pathlib.Path(__file__).parent
VOCAB, HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 320, 64, 4, 2, 16
PROMPT, GIVEN, NEW = 48, 16, 24


def base(model_type, architecture, **more):
    """What every config has."""
    return {
        "architectures": [architecture], "bos_token_id": 1, "eos_token_id": 2, "hidden_size": HIDDEN,
        "initializer_range": 0.02, "max_position_embeddings": 512, "model_type": model_type,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": VOCAB,
    } | more


def smallthinker(rope, slides, softmax, **more):
    layers = len(rope)
    config = base("smallthinker", "SmallThinkerForCausalLM", head_dim=HEAD_DIM, rms_norm_eps=1e-6,
                  moe_ffn_hidden_size=48, moe_num_active_primary_experts=2, moe_num_primary_experts=8,
                  norm_topk_prob=True, num_hidden_layers=layers, rope_layout=rope, rope_scaling=None,
                  sliding_window_layout=slides, sliding_window_size=16, **more)
    return config | ({"moe_primary_router_apply_softmax": True} if softmax else {})


CHECKPOINTS = {
    "smallthinker_4b": smallthinker([1, 1], [0, 0], False, rope_theta=1.5e6, tie_word_embeddings=True),
    "smallthinker_21b": smallthinker([0, 1, 0], [0, 1, 1], True, rope_theta=1.5e6),
    "turbosparse_mixtral": base(
        "turbosparsemixtral", "TurboSparseMixtralForCausalLM", hidden_act="relu", intermediate_size=96,
        num_experts_per_tok=2, num_hidden_layers=2, num_local_experts=8, rope_theta=1e6, sliding_window=None),
    "bamboo": base("bamboo", "BambooForCausalLM", hidden_act="relu", intermediate_size=96, num_hidden_layers=2,
                   rope_theta=1e4, sliding_window=20),
    "prosparse": base("sparsellama", "SparseLlamaForCausalLM", attention_bias=False, hidden_act="fatrelu",
                      hidden_act_param=0.01, intermediate_size=96, num_hidden_layers=2,
                      num_key_value_heads=HEADS, pretraining_tp=1, rope_scaling=None, rope_theta=1e4),
}
SEEDS = {"smallthinker_4b": 1, "smallthinker_21b": 11, "turbosparse_mixtral": 24, "bamboo": 31, "prosparse": 42}
# A rounding may not change a choice: differences of logits, of a gate and the threshold.
MARGINS = {"expert": 1e-3, "token": 1e-3, "threshold": 2e-6}


def weights(config, seed):
    """Tensors of a checkpoint in f32, each number one that bf16 has."""
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape, mean=0.0, std=0.12):
        x = torch.randn(*shape, generator=rng) * std + mean
        return x.to(torch.bfloat16).float()

    kv = config["num_key_value_heads"] * HEAD_DIM
    w = {"model.embed_tokens.weight": normal(VOCAB, HIDDEN, std=0.1 if config["tie_word_embeddings"] else 0.6),
         "model.norm.weight": normal(HIDDEN, mean=1.0, std=0.1)}
    if not config["tie_word_embeddings"]:
        w["lm_head.weight"] = normal(VOCAB, HIDDEN)
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}"
        for norm in ["input_layernorm", "post_attention_layernorm"]:
            w[f"{at}.{norm}.weight"] = normal(HIDDEN, mean=1.0, std=0.1)
        for name, out in [("q", HEADS * HEAD_DIM), ("k", kv), ("v", kv)]:
            w[f"{at}.self_attn.{name}_proj.weight"] = normal(out, HIDDEN)
        w[f"{at}.self_attn.o_proj.weight"] = normal(HIDDEN, HEADS * HEAD_DIM)
        experts, inner, router, names = network(config)
        if router:
            # The stream that SmallThinker's routers read is not normalised.
            w[f"{at}.{router}.weight"] = normal(experts, HIDDEN, std=0.5 if "primary" in router else 0.12)
        for e in range(experts):
            gate, up, down = (f"{at}.{n.format(e=e)}.weight" for n in names)
            w[gate], w[up], w[down] = normal(inner, HIDDEN), normal(inner, HIDDEN), normal(HIDDEN, inner)
    return w


def network(config):
    """Experts of a layer, their inner channels, the router, and the names of gate, up and down."""
    if config["model_type"] == "smallthinker":
        at = "block_sparse_moe.experts.{e}"
        return 8, 48, "block_sparse_moe.primary_router", [f"{at}.gate", f"{at}.up", f"{at}.down"]
    if config["model_type"] == "turbosparsemixtral":
        at = "block_sparse_moe.experts.{e}"
        return 8, 96, "block_sparse_moe.gate", [f"{at}.w1", f"{at}.w3", f"{at}.w2"]
    return 1, 96, None, ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]


class Reference:
    """The forward pass of one sequence, position by position from 0, without a cache."""

    def __init__(self, config, w):
        self.config, self.w, self.margins = config, w, {}

    def near(self, what, distances):
        """Keeps the smallest distance of a number from where a choice would fall otherwise."""
        self.margins[what] = min(self.margins.get(what, torch.inf), distances.abs().min().item())

    def norm(self, name, x):
        variance = x.pow(2).mean(-1, keepdim=True)
        return self.w[f"{name}.weight"] * (x * torch.rsqrt(variance + self.config["rms_norm_eps"]))

    def attention(self, at, x, rotate, window):
        n, kv = len(x), self.config["num_key_value_heads"]
        q, k, v = (F.linear(x, self.w[f"{at}.{p}_proj.weight"]).view(n, -1, HEAD_DIM).transpose(0, 1) for p in "qkv")
        if rotate:
            inv_freq = 1.0 / self.config["rope_theta"] ** (torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM)
            angles = torch.arange(n).float()[:, None] * inv_freq
            cos, sin = (torch.cat([f(angles)] * 2, -1) for f in (torch.cos, torch.sin))
            half = HEAD_DIM // 2
            q, k = (t * cos + torch.cat([-t[..., half:], t[..., :half]], -1) * sin for t in (q, k))
        k, v = (t.repeat_interleave(HEADS // kv, 0) for t in (k, v))
        scores = q @ k.transpose(1, 2) * HEAD_DIM**-0.5
        behind = torch.arange(n)[:, None] - torch.arange(n)[None, :]
        seen = (behind >= 0) & (behind < (window or n))
        y = scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v
        return F.linear(y.transpose(0, 1).reshape(n, -1), self.w[f"{at}.o_proj.weight"])

    def mlp(self, names, x):
        gate, up, down = (self.w[f"{n}.weight"] for n in names)
        g, u = F.linear(x, gate), F.linear(x, up)
        kind = self.config["model_type"]
        if kind == "smallthinker":
            h = F.relu(g) * u
        elif kind == "sparsellama":
            threshold = self.config["hidden_act_param"]
            self.near("threshold", g - threshold)
            h = torch.where(g >= threshold, g, torch.zeros_like(g)) * u
        else:
            h = F.relu(g) * F.relu(u)
        return F.linear(h, down)

    def experts(self, at, routed, x):
        """The mixture on `x`, whose router reads `routed`."""
        experts, _, router, names = network(self.config)
        logits = F.linear(routed, self.w[f"{at}.{router}.weight"])
        order = logits.sort(-1, descending=True).values
        self.near("expert", order[:, 1] - order[:, 2])
        best, ids = logits.topk(2, -1)
        if self.config["model_type"] == "turbosparsemixtral" or self.config.get("moe_primary_router_apply_softmax"):
            # Softmax over all experts, divided by the sum of the chosen, is softmax over the chosen.
            factors = best.softmax(-1)
        else:
            factors = best.sigmoid()
            factors = factors / factors.sum(-1, keepdim=True)
        y = torch.zeros_like(x)
        for e in range(experts):
            rows, slot = torch.where(ids == e)
            if len(rows):
                out = self.mlp([f"{at}.{n.format(e=e)}" for n in names], x[rows])
                y.index_add_(0, rows, out * factors[rows, slot, None])
        return y

    def __call__(self, ids):
        """Logits and the rows behind the last norm."""
        c = self.config
        layers = range(c["num_hidden_layers"])
        slides = c.get("sliding_window_layout") or [1 for _ in layers]
        window = c.get("sliding_window_size") or c.get("sliding_window")
        x = self.w["model.embed_tokens.weight"][ids]
        for i in layers:
            at, entered = f"model.layers.{i}", x
            h = self.norm(f"{at}.input_layernorm", x)
            rotate = c.get("rope_layout", [1 for _ in layers])[i]
            x = x + self.attention(f"{at}.self_attn", h, rotate, window if slides[i] else None)
            h = self.norm(f"{at}.post_attention_layernorm", x)
            if c["model_type"] == "smallthinker":
                y = self.experts(at, entered, h)
            elif c["model_type"] == "turbosparsemixtral":
                y = self.experts(at, h, h)
            else:
                y = self.mlp([f"{at}.{n}" for n in network(c)[3]], h)
            x = x + y
        x = self.norm("model.norm", x)
        head = self.w.get("lm_head.weight", self.w["model.embed_tokens.weight"])
        return F.linear(x, head), x


def greedy(reference, ids):
    """`NEW` tokens behind `ids`, each the one with the largest logit."""
    ids = ids.clone()
    for _ in range(NEW):
        last = reference(ids)[0][-1]
        first, second = last.topk(2).values
        reference.near("token", first - second)
        ids = torch.cat([ids, last.argmax()[None]])
    return ids


def check(name, config, w, ids, logits):
    """Compares with the class of transformers whose networks differ in the activation alone, and gives it that one."""
    import transformers
    from torch import nn

    kinds = {"turbosparsemixtral": "Mixtral", "bamboo": "Mistral", "sparsellama": "Llama"}
    if config["model_type"] not in kinds:
        return print(f"{name}: transformers has no class that differs in the activation alone")
    kind = kinds[config["model_type"]]
    own = {k: v for k, v in config.items() if k not in ("architectures", "hidden_act", "model_type", "torch_dtype")}
    own |= {"hidden_act": "relu", "attn_implementation": "eager", "experts_implementation": "eager"}
    model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**own)).float().eval()
    tensors = dict(w)
    for i, layer in enumerate(model.model.layers):
        if kind == "Mixtral":
            at, to = f"model.layers.{i}.block_sparse_moe", f"model.layers.{i}.mlp"
            gate, up, down = (torch.stack([tensors.pop(f"{at}.experts.{e}.{part}.weight") for e in range(8)])
                              for part in ("w1", "w3", "w2"))
            tensors[f"{to}.experts.gate_up_proj"] = torch.cat([gate, up], 1)
            tensors[f"{to}.experts.down_proj"] = down
            tensors[f"{to}.gate.weight"] = tensors.pop(f"{at}.gate.weight")
            layer.mlp.experts.forward = drelu_experts(layer.mlp.experts)
        elif kind == "Mistral":
            layer.mlp.up_proj.register_forward_hook(lambda _, __, up: up.relu())
        else:
            threshold = config["hidden_act_param"]
            layer.mlp.act_fn = nn.Threshold(torch.nextafter(torch.tensor(threshold), torch.tensor(0.0)).item(), 0.0)
    model.load_state_dict(tensors)
    with torch.no_grad():
        theirs = model(ids[None]).logits[0]
    print(f"{name}: {kind} of transformers {transformers.__version__} differs by {(theirs - logits).abs().max():.1e}")


def drelu_experts(experts):
    """The experts of Mixtral one token at a time, with both halves behind a ReLU."""
    def forward(x, index, factors):
        rows = []
        for row, chosen, by in zip(x, index, factors):
            y = 0
            for e, factor in zip(chosen, by):
                gate, up = (experts.gate_up_proj[e] @ row).chunk(2)
                y = y + factor * (experts.down_proj[e] @ (gate.relu() * up.relu()))
            rows.append(y)
        return torch.stack(rows)
    return forward


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--check", action="store_true", help="compare with transformers, and write nothing")
    checks = parser.parse_args().check
    torch.set_num_threads(1)
    for name, config in CHECKPOINTS.items():
        w = weights(config, SEEDS[name])
        ids = torch.randint(3, VOCAB, (PROMPT,), generator=torch.Generator().manual_seed(SEEDS[name] + 100))
        reference = Reference(config, w)
        logits, hidden = reference(ids)
        if checks:
            check(name, config, w, ids, logits)
            continue
        tokens = greedy(reference, ids[:GIVEN])
        assert 2 not in tokens[GIVEN:], "the last token of a text would end the generation"
        for what, margin in reference.margins.items():
            assert margin > MARGINS[what], f"the choice of a {what} of {name} hangs on {margin}"
        folder = HERE / name
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        save_file({k: v.to(torch.bfloat16).contiguous() for k, v in w.items()}, folder / "model.safetensors",
                  {"format": "pt"})
        save_file({"input_ids": ids.int(), "logits": logits, "hidden_last": hidden, "greedy_ids": tokens.int()},
                  folder / "expected.safetensors")
        margins = ", ".join(f"{what} by {margin:.1e}" for what, margin in reference.margins.items())
        print(f"{name}: closest choices: {margins}; spread of logits: {logits.std():.2f}")


if __name__ == "__main__":
    main()
