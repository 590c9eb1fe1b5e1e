"""What the tests of loading share: GGUF files are converted into a folder of each test's own."""

import pytest


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    # A string, because importing it would start MLX before its BLAS is set.
    module = "dflash_mlx.loading.gguf.gguf_file"
    monkeypatch.setattr(f"{module}.cache_folder", lambda part: tmp_path / "cache" / part)
