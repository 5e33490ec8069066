"""New weights into the model that vLLM serves, in place, and back out of it. Which, and when, is vllm.py's business."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


def load_in_place(model: Any, weights: Iterator[tuple[str, Tensor]], model_config: Any) -> set[str]:
    """Copies into the tensors that the CUDA graphs read. Names of the parameters that were given no value."""
    loaded = model.load_weights(weights)
    return {name for name, _ in model.named_parameters()} - loaded


def load_and_repack(model: Any, weights: Iterator[tuple[str, Tensor]], model_config: Any) -> set[str]:
    """For the CPU, where each matrix is packed for its GEMM after loading and the original is dropped."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    names = {name for name, _ in model.named_parameters()}
    initialize_layerwise_reload(model)
    # vLLM holds a layer's tensors until it has all of them (q, k and v are one matrix), the exporter does not.
    loaded = model.load_weights((name, tensor.clone()) for name, tensor in weights)
    finalize_layerwise_reload(model, model_config)
    for module in model.modules():
        if isinstance(module, ParallelLMHead):  # one tied to the embedding is not loaded, so not packed again
            module.quant_method.process_weights_after_loading(module)
    return names - loaded


def held_weights(model: Any) -> Iterator[tuple[str, Tensor]]:
    """This rank's parameters under vLLM's names, a tied one once. A matrix that was packed for a CPU's GEMM is read
    back as its product with the identity, which is exact: every sum has one term that is not zero."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            full_name = f"{module_name}.{name}" if module_name else name
            if names[id(parameter)] == full_name:
                packed = name == "weight" and not parameter.numel() and hasattr(module, "cpu_linear")
                yield full_name, _unpacked(module, parameter) if packed else parameter


def _unpacked(module: Any, emptied: Tensor) -> Tensor:
    """[rows, columns] of a linear layer of vLLM whose weight was packed and emptied."""
    columns = getattr(module, "input_size_per_partition", None) or module.input_size
    identity = torch.eye(columns, dtype=emptied.dtype, device=emptied.device)
    return module.cpu_linear(identity, emptied, None).t()
