"""New weights into the model that vLLM serves, in place. Which weights, and when, is vllm.py's business."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

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
