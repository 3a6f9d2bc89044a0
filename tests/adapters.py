"""Classes that stand in for those of peft."""

from __future__ import annotations

import copy
from types import SimpleNamespace

from models import torch


class PeftModel(torch.nn.Module):
    """Only the parts of peft's PeftModelForCausalLM that turboquant and `generate` use."""

    def __init__(self, model, peft_type):
        super().__init__()
        tuner = torch.nn.Module()
        tuner.model = model
        self.base_model = tuner if peft_type == "LORA" else model
        self.active_peft_config = SimpleNamespace(peft_type=peft_type)
        self.config = model.config

    def get_base_model(self):
        return self.base_model.model if self.active_peft_config.peft_type == "LORA" else self.base_model

    def prepare_inputs_for_generation(self, *args, **kwargs):
        return type(self.get_base_model()).prepare_inputs_for_generation(self.get_base_model(), *args, **kwargs)

    def generate(self, **kwargs):
        self.base_model.prepare_inputs_for_generation = self.prepare_inputs_for_generation
        try:
            return self.get_base_model().generate(
                **kwargs, max_new_tokens=6, do_sample=False, return_dict_in_generate=True
            )
        finally:
            del self.base_model.prepare_inputs_for_generation


class Adapted(torch.nn.Module):
    """The parts of peft's LoRA layers that `weight_sums` uses."""

    adapter_layer_names = ("lora_A", "lora_B")

    def __init__(self, linear):
        super().__init__()
        self.base_layer = linear
        rows, columns = linear.weight.shape
        generator = torch.Generator().manual_seed(0)
        self.lora_A = torch.nn.ModuleDict({"mine": torch.nn.Linear(columns, 2, bias=False)})
        self.lora_B = torch.nn.ModuleDict({"mine": torch.nn.Linear(2, rows, bias=False)})
        for part in (self.lora_A, self.lora_B):
            weight = part["mine"].weight
            weight.data = torch.randn(weight.shape, generator=generator)
        self.scaling, self.disable_adapters = {"mine": 2.0}, False
        self.active_adapters, self.merged_adapters = ["mine"], []

    def forward(self, x):
        out = self.base_layer(x)
        for name in () if self.disable_adapters else {*self.active_adapters} - {*self.merged_adapters}:
            out = out + self.scaling[name] * self.lora_B[name](self.lora_A[name](x))
        return out

    def merge(self):
        delta = self.lora_B["mine"].weight @ self.lora_A["mine"].weight
        self.base_layer.weight.data += self.scaling["mine"] * delta
        self.merged_adapters = ["mine"]


def adapted(model, layer=1, name="v_proj"):
    other = copy.deepcopy(model)
    attention = other.model.layers[layer].self_attn
    setattr(attention, name, Adapted(getattr(attention, name)))
    return other, getattr(attention, name)
