"""Which tensor of a state goes where, and whose values it has."""
