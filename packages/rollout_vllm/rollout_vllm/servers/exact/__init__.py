"""Operations that a server and a trainer share, so that both compute the same bits."""
