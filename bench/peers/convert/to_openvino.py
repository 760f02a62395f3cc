"""Exports a checkpoint for OpenVINO, with int8 weights: `to_openvino.py CHECKPOINT OUT`."""

import sys

from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig

source, out = sys.argv[1:]
model = OVModelForCausalLM.from_pretrained(
    source, export=True, compile=False, quantization_config=OVWeightQuantizationConfig(bits=8)
)
model.save_pretrained(out)
