import pytest


@pytest.fixture(autouse=True)
def nothing_from_outside(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """No test finds the data, the cache or the proxy of whoever runs it."""
    for name in ("FEDLENS_DATA", "FEDLENS_MIRROR", "http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
