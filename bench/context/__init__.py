"""The study of long sequences over ranks: planning time, balance and communication."""
