"""The requests that several tests of the engine share."""

import pytest


@pytest.fixture(scope="module")
def request_set():
    """Six requests for one small target, with three kinds of sampling settings."""
    from families import small_prompt  # here, because it starts MLX, whose BLAS is set first
    from request_set import RequestSet
    from tinymodels import target

    sampling = ({}, {"temperature": 0.8, "seed": 5}, {"presence_penalty": 0.4})
    requests = []
    for number in range(6):
        prompt = small_prompt(4 + 5 * number, number)
        requests.append((prompt, {"max_tokens": 24, **sampling[number % len(sampling)]}))
    return RequestSet(target(), requests)
