"""The data of the U-Net's recipe: images and their masks, what is drawn without them, and the overlap of a part."""

import sys

import pytest
import torch
from PIL import Image
from torch import nn

import unet
from lib.place import Place


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


def test_the_overlap_of_the_test_set_is_the_mean_over_its_images():
    mask = torch.zeros(3, 1, 4, 4)
    mask[:, :, :2] = 1
    logits = 2 * mask - 1
    batches = [(logits[:2], mask[:2]), (-logits[:1], mask[:1])]  # the last one is smaller
    assert unet.evaluate(nn.Identity(), batches, torch.device("cpu")) == pytest.approx((1 + 1 + 1 / 17) / 3)


@pytest.mark.parametrize(
    ("images", "ranks", "message"),
    [
        (20, 8, r"18 images for training do not fill a batch of 4 on 8 devices: give more images, or a smaller"),
        (4, 1, r"of 4 images none is left for the test: give 10 or more"),
    ],
)
def test_images_that_do_not_fill_a_step_or_leave_none_for_the_test_are_refused(images, ranks, message, monkeypatch):
    words = f"unet.py --size 16x16 --channels 2 --workers 0 --batch-size 4 --epochs 1 --images {images}"
    monkeypatch.setattr(sys, "argv", words.split())
    with pytest.raises(SystemExit, match=message):
        unet.fit(unet.parse(), Place(0, ranks, torch.device("cpu")))
