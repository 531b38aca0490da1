"""What transformers generates: the tokens that ours are compared with."""

from __future__ import annotations

import torch

from tests.serving.tiny_models import DOCUMENT, SECOND_END

ENDS = (DOCUMENT, SECOND_END)


def reference(model, prompts, new, *, ends=ENDS, **options):
    """transformers' new tokens of each prompt, in one batch padded on the left, up to the end token of each."""
    rows = [list(prompt.encode()) for prompt in prompts]
    length = max(map(len, rows))
    ids = torch.tensor([[DOCUMENT] * (length - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in rows])
    options = {"do_sample": False, **options}
    made = model.generate(ids, attention_mask=mask, max_new_tokens=new, eos_token_id=list(ends), **options)
    return [cut(row[length:].tolist(), ends) for row in made]


def cut(tokens, ends=ENDS):
    """Tokens up to the first end."""
    places = [place for place, token in enumerate(tokens) if token in ends]
    return tuple(tokens[: places[0] + 1] if places else tokens)
