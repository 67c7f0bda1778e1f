"""Create a small Llama with random weights on this machine, so that the whole path runs without a download.

The model generates nonsense, but every part of the stack treats it as a real model: it has safetensors weights, a BPE
tokenizer trained here, a chat template, a context of 2,048 tokens and 3.4 million parameters.

Run it as ``python -m ray_job.demo_model DIRECTORY``. A directory that already holds the model is kept.
"""

import argparse
import os
import shutil
import sys
from pathlib import Path

VOCABULARY_SIZE = 2_048
CONTEXT_TOKENS = 2_048
SEED = 20_26

# The spread of the weights. With transformers' default of 0.02 a random model repeats one token forever. At this value
# greedy answers differ from prompt to prompt, so that tests can distinguish rows.
INITIALIZER_RANGE = 0.35

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|{{ message['role'] }}|>{{ message['content'] }}<|end|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL_TOKENS = ("<|bos|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")


def save_model(directory: Path) -> None:
    """Save a tokenizer and a Llama.

    The tokenizer is a byte-level BPE, trained on the English text that ships with Python. The Llama's weights are drawn
    from a fixed seed and saved in float32.
    """
    from pydoc_data.topics import topics

    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((topics[name] for name in sorted(topics)), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|bos|>", eos_token="<|end|>", pad_token="<|end|>"
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.model_max_length = CONTEXT_TOKENS
    fast.save_pretrained(directory)

    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=CONTEXT_TOKENS,
        initializer_range=INITIALIZER_RANGE,
        tie_word_embeddings=True,
        bos_token_id=SPECIAL_TOKENS.index("<|bos|>"),
        eos_token_id=SPECIAL_TOKENS.index("<|end|>"),
    )
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(directory)


def make_demo_model(directory: Path) -> bool:
    """Create the model unless the directory already holds it.

    The files are created in a staging directory that is renamed at the end, so that an interrupted run leaves no
    incomplete model behind.

    Returns:
        Whether the model was created.
    """
    if (directory / "config.json").exists():
        return False
    staging = directory.with_name(f"{directory.name}.staging-{os.getpid()}")
    staging.mkdir(parents=True)
    try:
        save_model(staging)
        directory.parent.mkdir(parents=True, exist_ok=True)
        staging.rename(directory)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return True


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Make the small demo model.")
    parser.add_argument("directory", type=Path)
    directory = parser.parse_args().directory
    made = make_demo_model(directory)
    print(f"{'made' if made else 'kept'} the demo model in {directory}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
