"""The multi-replica service: launch, routing, the request table, refits, clean-up."""

from rl_vllm.service.async_vllm import AsyncVLLM
from rl_vllm.service.outputs import CompletionOutput, Logprob, RequestOutput

__all__ = ["AsyncVLLM", "CompletionOutput", "Logprob", "RequestOutput", "make_async_vllm_engine"]


def make_async_vllm_engine(
    *,
    model_name: str,
    num_devices: int | None = None,
    num_replicas: int = 1,
    verbose: bool = True,
    compile: bool | None = None,  # noqa: A002 (TorchRL's name for it)
    enable_fp32_output: bool = False,
    **engine_kwargs: object,
) -> AsyncVLLM:
    """TorchRL's name for :meth:`AsyncVLLM.from_pretrained`."""
    return AsyncVLLM.from_pretrained(
        model_name,
        num_devices,
        num_replicas,
        verbose=verbose,
        compile=compile,
        enable_fp32_output=enable_fp32_output,
        **engine_kwargs,
    )
