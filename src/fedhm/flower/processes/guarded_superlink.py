"""Flower's SuperLink, which takes runs only from holders of a token.

Whoever may start a run can execute code on this machine. Flower's SuperLink can require an account, but the published
package offers no kind of account. `TokenAccount` is one: a holder of the token gets the account that Flower uses
without logins. Flower's own command finds the token in its FLWR_HOME (`secrets.py`) and sends it.

This file is run by its path, `python -P guarded_superlink.py TOKEN_FILE flower-superlink …`: importing the package
would take seconds.
"""

import hmac
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from flwr.common.constant import ACCESS_TOKEN_KEY, NOOP_ACCOUNT_NAME, NOOP_FLWR_AID
from flwr.supercore.auth.typing import AccountAuthCredentials, AccountAuthLoginDetails, AccountInfo
from flwr.superlink.auth_plugin import ControlAuthnPlugin

Metadata = Sequence[tuple[str, str | bytes]]


class TokenAccount(ControlAuthnPlugin):
    """The account of a holder of the token. There are no logins and no other accounts."""

    def __init__(self, token: str = "") -> None:
        self._token = token

    def get_login_details(self) -> AccountAuthLoginDetails | None:
        return None

    def validate_tokens_in_metadata(self, metadata: Metadata) -> tuple[bool, AccountInfo | None]:
        given = str(dict(metadata).get(ACCESS_TOKEN_KEY, ""))
        if not self._token or not hmac.compare_digest(given.encode(), self._token.encode()):
            return False, None
        return True, AccountInfo(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME)

    def get_auth_tokens(self, device_code: str) -> AccountAuthCredentials | None:  # noqa: ARG002
        return None

    def refresh_tokens(self, metadata: Metadata) -> tuple[Metadata | None, AccountInfo | None]:  # noqa: ARG002
        return None, None


if __name__ == "__main__":
    _, token_file, *sys.argv = sys.argv
    account = TokenAccount(Path(token_file).read_text(encoding="utf-8"))
    # by import_module, because the package has a function of the same name that hides the module
    command: Any = import_module("flwr.superlink.cli.flower_superlink")
    command.load_control_authn_plugin = lambda: account
    command.flower_superlink()
