"""What the tests of loading share: GGUF files are converted into a folder of each test's own."""

import pytest


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    convert = "dflash_mlx.loading.gguf.convert"  # not imported here: it starts MLX, before its BLAS
    monkeypatch.setattr(f"{convert}.cache_folder", lambda part: tmp_path / "cache" / part)
