"""OpenVINO: the model that optimum-intel exported, on the stateful graph that OpenVINO GenAI runs. Arguments: folder,
threads, context, format. GenAI's own pipelines want a tokenizer, so the graph is called by itself."""

import sys
from pathlib import Path

from common import prompt_ids, serve, timed


class OpenVino:
    def __init__(self, path, threads, _context, _fmt):
        import json

        import numpy as np
        import openvino

        self.np, self.openvino = np, openvino
        self.vocab = json.loads((Path(path) / "config.json").read_text())["vocab_size"]
        options = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"}
        model = openvino.Core().compile_model(str(Path(path) / "openvino_model.xml"), "CPU", options)
        self.names = {name for port in model.inputs for name in port.names}
        self.request = model.create_infer_request()

    def call(self, ids, start):
        i64 = lambda values: self.np.array([values], dtype=self.np.int64)
        values = {
            "input_ids": i64(ids), "attention_mask": i64([1] * (start + len(ids))),
            "position_ids": i64(list(range(start, start + len(ids)))), "beam_idx": self.np.zeros(1, self.np.int32),
        }
        self.request.infer({k: v for k, v in values.items() if k in self.names})

    def time(self, prompt, gen):
        ids = prompt_ids(0, prompt, self.vocab)
        self.request.reset_state()
        prefill, _ = timed(lambda: self.call(ids, 0))
        decode, _ = timed(lambda: [self.call([ids[i % prompt]], prompt + i) for i in range(gen)])
        return {"prefill": prompt / prefill, "decode": gen / decode}

    def logits(self, ids, out):
        self.request.reset_state()
        self.call(ids, 0)
        self.np.save(out, self.request.get_output_tensor(0).data[0])
        return {"out": out}

    def version(self):
        return {"version": self.openvino.__version__}


if __name__ == "__main__":
    path, threads, context, fmt = sys.argv[1:]
    serve(OpenVino(path, int(threads), int(context), fmt))
