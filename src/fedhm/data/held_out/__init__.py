"""Samples that clients do not train on: public ones, those to choose settings by, clients' own tests."""
