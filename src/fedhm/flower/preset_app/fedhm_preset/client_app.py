"""The ClientApp: it runs on every node."""

from fedhm.flower.clients import config_client_app

app = config_client_app()
