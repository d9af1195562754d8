"""The policy that the example trains: a small causal language model, its reward, and one REINFORCE step."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

PROMPT_TOKENS = 6
TARGET_EVERY = 4
"""The policy learns to generate tokens that are multiples of this number: a quarter of the vocabulary."""

ENTROPY_BONUS = 0.05


@dataclass(frozen=True)
class Step:
    """Result of one training step."""

    reward: float
    gap: float
    """Largest difference between the log-probability of a sampled token here and on its engine. Near zero while the
    engines hold exactly this policy.
    """


class Policy:
    """The model, its optimizer, and the random prompts it is trained on."""

    def __init__(self, path: str, *, seed: int, learning_rate: float) -> None:
        torch.manual_seed(seed)
        self._random = random.Random(seed)
        transformers_logging.disable_progress_bar()  # a progress table follows
        # float32 on both sides, so that greedy tokens can be compared exactly.
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self.vocabulary: int = self.model.config.vocab_size
        self._optimizer = torch.optim.Adam(self.model.parameters(), lr=learning_rate)

    def prompts(self, number: int) -> list[list[int]]:
        """Return random prompts, reproducible by the seed. The first token ids are left out, because they are special tokens."""
        return [[self._random.randrange(8, self.vocabulary) for _ in range(PROMPT_TOKENS)] for _ in range(number)]

    def train(self, prompts: list[list[int]], outputs: list[list[int]], sampled_logprobs: list[list[float]]) -> Step:
        """Take one policy-gradient step on samples of equal length.

        REINFORCE: the log-probability of each sampled token is weighted by its reward minus a baseline, the mean reward
        of the batch. A token's reward depends on this token alone. The entropy bonus keeps the policy from repeating one
        token.
        """
        tokens = torch.tensor(outputs)
        rewards = (tokens % TARGET_EVERY == 0).float()
        advantage = (rewards - rewards.mean()) / (rewards.std() + 1e-6)

        logits = self.model(torch.cat([torch.tensor(prompts), tokens], dim=1)).logits
        predicted = logits[:, PROMPT_TOKENS - 1 : -1]
        log_policy = torch.log_softmax(predicted, dim=-1)
        logprobs = log_policy.gather(2, tokens.unsqueeze(2)).squeeze(2)
        entropy = -(log_policy.exp() * log_policy).sum(-1).mean()
        loss = -(advantage * logprobs).mean() - ENTROPY_BONUS * entropy
        self._optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        gap = (logprobs.detach() - torch.tensor(sampled_logprobs)).abs().max().item()
        return Step(reward=rewards.mean().item(), gap=gap)

    def greedy(self, prompts: list[list[int]], tokens: int) -> list[list[int]]:
        """Return the greedy continuation of each prompt."""
        sequences = torch.tensor(prompts)
        with torch.no_grad():
            for _ in range(tokens):
                sequences = torch.cat([sequences, self.model(sequences).logits[:, -1:].argmax(-1)], dim=1)
        return [row[PROMPT_TOKENS:] for row in sequences.tolist()]

    def best_tokens(self, prompts: list[list[int]], outputs: list[list[int]]) -> list[list[tuple[int, float]]]:
        """Return, for each output token, the best token after the same prefix, and by how much its log-probability is higher."""
        tokens = torch.tensor(outputs)
        with torch.no_grad():
            logits = self.model(torch.cat([torch.tensor(prompts), tokens], dim=1)).logits[:, PROMPT_TOKENS - 1 : -1]
        log_policy = torch.log_softmax(logits, dim=-1)
        highest, best = log_policy.max(-1)
        leads = highest - log_policy.gather(2, tokens.unsqueeze(2)).squeeze(2)
        return [list(zip(*row, strict=True)) for row in zip(best.tolist(), leads.tolist(), strict=True)]
