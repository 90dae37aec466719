"""The ClientApp: it runs on every SuperNode."""

from fedhm.flower import client_app
from mixed_fleet.task import build_model, client_data

app = client_app(build_model, client_data)
