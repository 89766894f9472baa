"""What is private of Serve, and finds the one that runs, is as it was; clusters' tests hold what it does."""

from __future__ import annotations

import inspect

import pytest
import ray
from ray.serve import context
from ray.serve.config import HTTPOptions

from serve_apps.replica.serve_private import find_serve, wait_for_no_proxies


def test_a_process_that_is_in_no_cluster_finds_no_serve_and_starts_nothing() -> None:
    assert not ray.is_initialized()
    assert find_serve() is None
    assert not ray.is_initialized()


def test_serve_still_has_what_is_used_of_it() -> None:
    assert not inspect.signature(context._check_cached_client_alive).parameters
    found = inspect.signature(context._get_global_client).parameters
    assert list(found) == ["raise_if_no_controller_running"]
    assert isinstance(inspect.getattr_static(context.ServeControllerClient, "http_config"), property)
    assert {"host", "port"} <= HTTPOptions.model_fields.keys()
    assert "_controller" in inspect.getsource(context.ServeControllerClient.__init__)


def test_an_application_is_given_to_serve_without_a_wait_for_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    client = context.ServeControllerClient.__new__(context.ServeControllerClient)
    arguments = inspect.signature(client.wait_for_proxies_serving)
    monkeypatch.setattr(context, "_global_client", client)
    wait_for_no_proxies()
    assert inspect.signature(client.wait_for_proxies_serving).parameters.keys() == arguments.parameters.keys()
    assert "self.wait_for_proxies_serving(" in inspect.getsource(client.deploy_applications)
