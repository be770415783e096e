"""Experts on ranks: what ``waybill.torch.moe`` gives."""
