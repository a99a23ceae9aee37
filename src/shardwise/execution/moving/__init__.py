"""Tensors between ranks: parcels packed, sent and unpacked, round by round."""
