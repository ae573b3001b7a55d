"""The admission webhook: a server of its own, stateless, around `injection.inject`."""
