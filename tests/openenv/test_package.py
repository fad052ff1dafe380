"""Tests of packages by OpenEnv's own command, and of their servers."""

import importlib.util
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from openenv_server import serving_app

from lrl.codecs.numbers import NumberFormat
from lrl.envs.factory import GymnasiumEnvs
from lrl.openenv.command import write_package
from lrl.openenv.factory import OpenEnvEnvs

CARTS = GymnasiumEnvs("CartPole-v1", numbers=NumberFormat(kind="integers"), reset_options={"low": -0.01}, max_invalid=3)


def openenv(*words):
    """Run ``openenv ...``."""
    command = [sys.executable, str(Path(__file__).parents[1] / "openenv_cli.py"), *words]
    return subprocess.run(command, capture_output=True, text=True)


def module_of(folder):
    """Return the server module of a folder."""
    spec = importlib.util.spec_from_file_location("packaged_app", folder / "server" / "app.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def app_of(folder):
    """Return the application of a folder as its server imports it."""
    return module_of(folder).app


@pytest.mark.slow
def test_openenv_validates_the_folder_and_its_server(tmp_path):
    write_package(tmp_path / "lake", GymnasiumEnvs("FrozenLake-v1"), (-0.1, 1.0), "lrl[openenv]")
    result = openenv("validate", str(tmp_path / "lake"), "--level", "static")
    assert result.returncode == 0 and "Verdict: PASS" in result.stdout, result.stdout + result.stderr
    with serving_app(app_of(tmp_path / "lake")) as url:
        result = openenv("validate", "--url", url)
    assert result.returncode == 0 and "Verdict: PASS" in result.stdout, result.stdout + result.stderr
    manifest = tmp_path / "lake" / "openenv.yaml"
    manifest.write_text(manifest.read_text().replace("floor_margin: 0.1", "floor_margin: 0.0"))
    assert "Verdict: FAIL" in openenv("validate", str(tmp_path / "lake"), "--level", "static").stdout


def test_the_folder_serves_the_environment_with_its_settings(tmp_path):
    write_package(tmp_path / "cart", CARTS, (0.0, 1.0), "lrl[openenv] @ git+https://example.org/lrl")
    with serving_app(app_of(tmp_path / "cart")) as url:
        there, here = OpenEnvEnvs(url, max_invalid=9).make(1, "direct"), CARTS.make(1, "direct")
        assert there.reset(seed=[4])[0] == here.reset(seed=[4])[0]
        there.close()
    project = tomllib.loads((tmp_path / "cart" / "pyproject.toml").read_text())["project"]
    assert project["dependencies"] == ["lrl[openenv] @ git+https://example.org/lrl"]
    assert project["scripts"] == {"server": "cartpole_v1.server.app:main"}
    assert all((tmp_path / "cart" / name).exists() for name in ("README.md", "client.py", "server/Dockerfile"))


def test_only_the_image_listens_on_all_interfaces(tmp_path, monkeypatch, capsys):
    write_package(tmp_path / "cart", CARTS, (0.0, 1.0), "lrl[openenv]")
    module, addresses = module_of(tmp_path / "cart"), []
    monkeypatch.setattr(module, "make_server", lambda app: type("StubServer", (), {"run": served}))

    def served(sockets):
        addresses.append(sockets[0].getsockname()[0])

    for words, said in ([], "until Ctrl+C\n"), (["--host", "0.0.0.0"], "other machines can connect"):
        monkeypatch.setattr(sys, "argv", ["app.py", "--port", "0", *words])
        module.main()
        assert said in capsys.readouterr().out
    assert addresses == ["127.0.0.1", "0.0.0.0"]
    assert '"--host", "0.0.0.0"' in (tmp_path / "cart" / "server" / "Dockerfile").read_text()


def test_a_folder_that_cannot_be_written_raises_one_sentence(tmp_path):
    with pytest.raises(ValueError, match="reward_range is 1 0; it must be two numbers, the smaller one first"):
        write_package(tmp_path / "x", CARTS, (1.0, 0.0), "lrl")
    (tmp_path / "kept").write_text("")
    with pytest.raises(ValueError, match="package is .*, which is not empty"):
        write_package(tmp_path, CARTS, (0.0, 1.0), "lrl")
    with pytest.raises(ValueError, match="env: env.id is 'Nowhere-v0', which is not registered"):
        write_package(tmp_path / "x", GymnasiumEnvs("Nowhere-v0"), (0.0, 1.0), "lrl")
    assert not (tmp_path / "x").exists()
