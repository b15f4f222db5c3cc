"""The snippets of the start page, as one program: generate, look, refit.

Run it with ``python docs/first_steps.py [MODEL]``; without a model it takes the small instruct model of the quickstart.
"""

# ruff: noqa: T201

import sys

from rl_vllm.testing.models import smollm2_checkpoint

MODEL = sys.argv[1] if len(sys.argv) > 1 else str(smollm2_checkpoint())


def main() -> None:
    # [generate]
    from tensordict import TensorDict
    from torchrl.data.llm import History

    from rl_vllm import AsyncVLLM, EngineConfig, VLLMPolicy

    service = AsyncVLLM.launch(EngineConfig(model=MODEL), num_replicas=1)
    policy = VLLMPolicy(service, input_mode="history", num_samples=4, sampling={"max_tokens": 32, "seed": 0})

    questions = ["What is the capital of France?", "Name a fruit."]
    chats = History.from_chats([[{"role": "user", "content": question}] for question in questions])
    out = policy(TensorDict(history=TensorDict(prompt=chats, batch_size=2), batch_size=2))

    print(out.batch_size)  # torch.Size([2, 4])
    print(out[0, 0]["text"].response)  # the first answer to the first question
    print(out["log_probs", "response"].shape)  # float32 [2, 4, R], nats, of the sampled tokens
    print(out["policy_version"].max())  # 0: the weights that were loaded at launch
    # [/generate]

    # [refit]
    from transformers import AutoModelForCausalLM

    from rl_vllm import VLLMWeightSyncScheme

    model = AutoModelForCausalLM.from_pretrained(MODEL)
    sender = VLLMWeightSyncScheme(service=service).create_sender()
    sender.register_model(model)
    # ... train the model ...
    receipt = sender.update_weights()
    print(receipt)  # version=1 transport=shared_storage replicas=1 ... checksum=...
    # [/refit]

    # [shutdown]
    sender.shutdown()
    service.shutdown()
    # [/shutdown]


if __name__ == "__main__":
    main()
