"""The names of activation functions in the headers: activation/activations.cuh and .h. Of a gated one, what the gate goes through."""

from __future__ import annotations

ACTIVATION_NAMES = {None: "kNone", "relu": "kRelu", "gelu": "kGelu", "gelu_tanh": "kGeluTanh", "silu": "kSilu",
                    "swiglu": "kSilu", "geglu": "kGelu", "relu2": "kRelu2", "geglu_tanh": "kGeluTanh", "reglu": "kRelu",
                    "swiglu_oai": "kSwishPlusOne", "swiglu_clamped": "kSilu", "geglu_clamped": "kGelu",
                    "geglu_tanh_clamped": "kGeluTanh", "reglu_clamped": "kRelu"}
