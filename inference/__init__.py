"""Engines behind one protocol, and the tokens that go in and come out of them."""
