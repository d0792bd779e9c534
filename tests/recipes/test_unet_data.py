"""The data of the U-Net's recipe: images with their masks, and what is drawn where there are none."""

import pytest
import torch
from PIL import Image

import unet


def test_masks_are_found_by_name_and_stay_zero_or_one_at_another_size(tmp_path):
    for folder in ("imgs", "masks"):
        (tmp_path / folder).mkdir()
    for name in ("a", "b", "without"):
        Image.new("RGB", (40, 20), (255, 0, 0)).save(tmp_path / "imgs" / f"{name}.jpg")
    half = Image.new("L", (40, 20))
    half.paste(255, (0, 0, 20, 20))
    half.save(tmp_path / "masks" / "a_mask.png")
    Image.new("L", (40, 20), 255).save(tmp_path / "masks" / "b_mask.gif")
    data = unet.Masked(tmp_path, (16, 32))
    assert len(data) == 2
    image, mask = data[0]
    assert (image.shape, mask.shape) == ((3, 16, 32), (1, 16, 32))
    assert mask.unique().tolist() == [0.0, 1.0]
    assert mask.mean() == 0.5
    assert data[1][1].min() == 1
    (tmp_path / "masks" / "a_mask.png").unlink()
    (tmp_path / "masks" / "b_mask.gif").unlink()
    with pytest.raises(
        SystemExit, match=r"has no image imgs/NAME\.jpg with a mask masks/NAME_mask\.gif or masks/NAME_mask"
    ):
        unet.Masked(tmp_path, (16, 32))


def test_ellipses_are_the_same_at_each_index_and_their_masks_are_not_empty():
    data = unet.Ellipses(4, (32, 48))
    for index in range(4):
        (image, mask), (again, other) = data[index], data[index]
        assert torch.equal(image, again)
        assert torch.equal(mask, other)
        assert image.shape == (3, 32, 48)
        assert 0 < mask.mean() < 1
    assert not torch.equal(data[0][1], data[1][1])


def test_overlap_is_one_where_prediction_and_mask_are_the_same():
    mask = torch.zeros(2, 1, 4, 4)
    mask[:, :, :2] = 1
    assert unet.dice(mask, mask) == 1
    assert unet.dice(1 - mask, mask) == pytest.approx(1 / 17)
