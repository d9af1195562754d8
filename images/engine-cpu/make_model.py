"""Make a tiny random language model with a tokenizer of its own, in the layout of the Hugging Face hub.

    python make_model.py OUT [--arch llama|qwen2|qwen3moe|reward] [--dtype float32] [--hidden 128] [--layers 2] [--seed 0]

The default (Llama, 2 layers x 128, vocabulary 2048, float32) is small enough to answer hundreds of tokens a second on one
core, and float32 makes greedy tokens comparable exactly between a server and a plain forward pass. ``reward`` is a Llama with one
number as its answer (a reward model): start SGLang with ``--is-embedding``.
Needs torch, transformers and tokenizers; where torchvision is missing, the stand-ins on PYTHONPATH.
"""

import argparse
import itertools
import random
import string
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

_WORDS = (
    "alpha beta gamma server router weight update token model train policy reward step the a of and to in is "
    "one two three four five red blue green cat dog sun moon up down left right"
)
_END, _PAD = "<|im_end|>", "<|endoftext|>"
_CHAT = (
    "{% for m in messages %}<|im_start|>{{m['role']}}\n{{m['content']}}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_EXPERTS = {"moe_intermediate_size": 128, "num_experts": 8, "num_experts_per_tok": 2, "head_dim": 32}
_FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3moe": (
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
        {"moe_intermediate_size": 128, "num_experts": 8, "num_experts_per_tok": 2, "head_dim": 32},
    ),
    "reward": (LlamaConfig, LlamaForSequenceClassification, {"num_labels": 1}),
}


def make_tokenizer(vocabulary: int, context: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on made-up sentences; the same words come out every time."""
    rnd, words = random.Random(0), _WORDS.split()  # noqa: S311 - the same words every time
    sentences = [" ".join(rnd.choice(words) for _ in range(30)) + "." for _ in range(400)]
    letters = ("".join(rnd.choices(string.ascii_lowercase, k=rnd.randint(2, 9))) for _ in range(6000))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[_PAD, "<|im_start|>", _END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(itertools.chain(sentences, letters), trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=_END, pad_token=_PAD, model_max_length=context)
    fast.chat_template = _CHAT
    return fast


def make_model(arch: str, *, hidden: int, layers: int, vocabulary: int, context: int, end: int, seed: int) -> PreTrainedModel:
    """Make the model with weights wide enough that greedy tokens depend on the prompt."""
    heads = max(1, hidden // 32)
    config_class, model_class, more = _FAMILIES[arch]
    config = config_class(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 2),
        max_position_embeddings=context,
        tie_word_embeddings=False,
        eos_token_id=end,
        bos_token_id=None,
        pad_token_id=0,
        **more,
    )
    torch.manual_seed(seed)
    model = model_class(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0, 0.08)
    return model


def main() -> None:
    """Read the command line, write the model, print its path and size."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--arch", choices=sorted(_FAMILIES), default="llama")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--vocabulary", type=int, default=2048)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.hidden % 64:
        parser.error(f"--hidden must be a multiple of 64 (two attention heads of 32), not {args.hidden}")
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer(args.vocabulary, args.context)
    tokenizer.save_pretrained(args.out)
    end = tokenizer.convert_tokens_to_ids(_END)
    model = make_model(
        args.arch, hidden=args.hidden, layers=args.layers, vocabulary=args.vocabulary, context=args.context, end=end, seed=args.seed
    )
    model.to(getattr(torch, args.dtype)).save_pretrained(args.out)
    for file in args.out.iterdir():
        file.chmod(0o644)  # safetensors writes 0600, and the server may run as another user
    print(f"{args.out}: {args.arch}, {sum(p.numel() for p in model.parameters()):,} parameters, {args.dtype}")


if __name__ == "__main__":
    main()
