import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import fedlens as fl
from fedlens.config.options import options_of, resolve
from fedlens.core.federation import Pool
from fedlens.data import DATASETS, Source, published
from fedlens.data.arrays import held_out, mean_and_std
from fedlens.data.partitions import PARTITIONS
from fedlens.data.pictures import Form, pixels_of
from fedlens.data.pictures import read as read_pixels
from tests.data.published_files import pixels


def write_image(path: Path, value: int = 0, side: int = 4, mode: str = "RGB") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, (side, side), value if mode == "L" else (value, 0, 0)).save(path)


def load(name: str, base: Path, **options):
    """As an experiment does: options checked, then given."""
    function = DATASETS[name]
    return function(Source(base=base), **resolve(options_of(function), options, name))


@pytest.fixture
def animals(tmp_path: Path) -> Path:
    """Ten cats, red 0 to 9, and five dogs, red 100 to 104."""
    for i in range(10):
        write_image(tmp_path / "animals" / "cat" / f"{i}.png", i)
    for i in range(5):
        write_image(tmp_path / "animals" / "dog" / f"{i}.PNG", 100 + i)
    return tmp_path


def test_a_folder_of_class_folders_is_divided_class_by_class(animals):
    (animals / "animals" / "cat" / "notes.txt").write_text("not an image")
    (animals / "animals" / ".hidden").mkdir()
    found = load("folder", animals, path="animals")
    assert (found.classes, found.shape) == (("cat", "dog"), (3, 4, 4))
    assert found.train.labels.tolist() == [0] * 8 + [1] * 4
    assert found.test.labels.tolist() == [0] * 2 + [1]
    reds = found.train.images[:, 0, 0, 0].tolist() + found.test.images[:, 0, 0, 0].tolist()
    assert sorted(reds) == [*range(10), *range(100, 105)]
    assert found.train.images.permute(0, 2, 3, 1).is_contiguous()
    again = load("folder", animals, path="animals")
    assert torch.equal(again.train.images, found.train.images)


@pytest.mark.parametrize("name", ["test", "val"])
def test_a_folder_with_train_and_test_is_taken_as_it_is(animals, name):
    (animals / "animals").rename(animals / "train")
    write_image(animals / name / "dog" / "a.jpg", 200)
    found = load("folder", animals, path=".", channels=1)
    assert (len(found.train), len(found.test)) == (15, 1)
    assert found.test.labels.tolist() == [1]
    assert found.shape == (1, 4, 4)


def test_tiny_imagenet_lists_the_classes_of_its_test_images(animals):
    shutil.move(animals / "animals", animals / "train")
    write_image(animals / "val" / "images" / "val_0.png")
    (animals / "val" / "val_annotations.txt").write_text("val_0.png\tdog\t0\t0\t3\t3\n")
    assert load("folder", animals, path=".").test.labels.tolist() == [1]


def test_images_are_resized_to_the_size(animals):
    write_image(animals / "animals" / "cat" / "large.png", 7, side=9)
    with pytest.raises(ValueError, match="9×9"):
        load("folder", animals, path="animals")
    found = load("folder", animals, path="animals", size=6)
    assert found.shape == (3, 6, 6)
    assert len(found.train) + len(found.test) == 16


def test_a_photo_is_turned_as_its_camera_says(tmp_path):
    image = Image.new("L", (4, 4), 0)
    image.paste(255, (0, 0, 4, 2))
    exif = Image.Exif()
    exif[0x0112] = 3  # upside down
    for name in "ab":
        (tmp_path / "class").mkdir(exist_ok=True)
        image.save(tmp_path / "class" / f"{name}.png", exif=exif)
    found = load("folder", tmp_path, path=".", channels=1)
    assert found.train.images[0, 0, :, 0].tolist() == [0, 0, 255, 255]


def test_an_image_that_cannot_be_decoded_is_named(animals):
    file = animals / "animals" / "dog" / "2.PNG"
    file.write_bytes(file.read_bytes()[:40])
    with pytest.raises(ValueError, match=r"dog/2\.PNG"):
        load("folder", animals, path="animals")


@pytest.mark.parametrize(
    ("ending", "kind"), [("png", np.uint16), ("tif", np.uint16), ("tif", np.int32), ("tif", "f4")]
)
def test_gray_of_more_than_8_bits_goes_from_its_darkest_to_its_brightest_pixel(
    tmp_path, ending, kind
):
    """12 of 16 bits, as scanners save them: 100, 1100, 2100 and 4100."""
    values = np.array([[100, 1100], [2100, 4100]]).astype(kind)
    Image.fromarray(values).save(tmp_path / f"scan.{ending}")
    expected = [0, round(255 / 4), round(255 / 2), 255]
    assert read_pixels(tmp_path / f"scan.{ending}", Form(channels=1)).flatten().tolist() == expected
    colours = read_pixels(tmp_path / f"scan.{ending}", Form(channels=3))
    assert colours.shape == (2, 2, 3) and colours[..., 2].flatten().tolist() == expected


def test_deep_gray_without_contrast_is_black_and_without_numbers_refused(tmp_path):
    Image.fromarray(np.full((4, 4), 40000, np.uint16)).save(tmp_path / "flat.png")
    assert not read_pixels(tmp_path / "flat.png", Form(channels=1)).any()
    Image.fromarray(np.full((4, 4), np.nan, np.float32)).save(tmp_path / "none.tif")
    with pytest.raises(ValueError, match="finite"):
        read_pixels(tmp_path / "none.tif", Form(channels=1))


def test_cmyk_and_alpha_have_the_colours_that_viewers_show(tmp_path):
    Image.new("CMYK", (8, 8), (0, 255, 255, 0)).save(tmp_path / "print.jpg", quality=100)
    assert (
        np.abs(
            read_pixels(tmp_path / "print.jpg", Form(channels=3)).astype(int) - [255, 0, 0]
        ).max()
        <= 4
    )
    Image.new("RGBA", (2, 2), (10, 20, 30, 128)).save(tmp_path / "clear.png")
    assert read_pixels(tmp_path / "clear.png", Form(channels=3))[0, 0].tolist() == [10, 20, 30]


def test_a_large_jpeg_is_decoded_small_and_looks_the_same(tmp_path):
    rng = np.random.default_rng(0)
    coarse = Image.fromarray(rng.integers(0, 256, (12, 16, 3), np.uint8))
    photo = coarse.resize((1600, 1200), Image.Resampling.BICUBIC)
    photo.save(tmp_path / "photo.jpg", quality=92)
    with Image.open(tmp_path / "photo.jpg") as file:
        small = pixels_of(file, Form(64, 3))
        assert file.size == (200, 150)  # an eighth, more than twice what is asked for
    exact = np.asarray(photo.resize((64, 64), Image.Resampling.BILINEAR)).astype(int)
    assert np.abs(small - exact).mean() < 2 and np.abs(small - exact).max() < 20


def misname_a_class_of_test(at: Path) -> None:
    (at / "animals").rename(at / "train")
    shutil.move(at / "train", at / "animals" / "train")
    write_image(at / "animals" / "test" / "dogs" / "a.png")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda at: (at / "animals").rename(at / "other"), "animals is not a folder: set path"),
        (lambda at: (at / "animals" / "owl").mkdir(), "owl has no images: add some"),
        (lambda at: [*map(shutil.rmtree, (at / "animals").iterdir())], "class folders"),
        (misname_a_class_of_test, "of class 'dogs', which train does not have: did you mean 'dog'"),
    ],
)
def test_a_folder_that_is_not_as_it_should_be_says_why(animals, change, message):
    change(animals)
    with pytest.raises(ValueError, match=message):
        load("folder", animals, path="animals")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 0}, "size is 0"),
        ({"test_share": 1.0}, "test_share is 1.0"),
        ({"channels": 2}, "channels is 2"),
        ({"sise": 3}, "did you mean 'size'"),
    ],
)
def test_options_are_checked(animals, options, message):
    with pytest.raises(ValueError, match=message):
        load("folder", animals, path="animals", **options)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.floats(0.01, 0.99))
def test_each_class_gives_its_share_and_keeps_one(labels, share):
    names = [str(i) for i in range(len(labels))]
    if len(set(labels)) == len(labels):
        with pytest.raises(ValueError, match="one image a class"):
            held_out(names, labels, share)
        return
    chosen = held_out(names, labels, share)
    for label in set(labels):
        tested = [test for test, other in zip(chosen, labels, strict=True) if other == label]
        assert sum(tested) < len(tested)
        assert abs(sum(tested) - share * len(tested)) <= 1
        assert sum(tested) or len(tested) == 1


def test_one_image_listed_twice_falls_on_one_side():
    names = [f"{i % 10}.png" for i in range(30)]
    chosen = held_out(names, [0] * 30, 0.3)
    assert len({name for name, test in zip(names, chosen, strict=True) if test}) == 3
    assert chosen[:10] == chosen[10:20] == chosen[20:]


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 2)), min_size=8, max_size=60))
def test_a_patient_is_on_one_side_whatever_classes_they_have(found):
    names = [f"patient {who}" for who, _ in found]
    try:
        chosen = held_out(names, [label for _, label in found], 0.3)
    except ValueError:
        return
    sides = {(name, test) for name, test in zip(names, chosen, strict=True)}
    assert len(sides) == len(set(names)) and any(chosen) and not all(chosen)


HEADER = "path,label,client,lat,lon,split,camera\n"
ROWS = [
    "animals/cat/0.png,10,anna,0.5,-180,train,x\n",
    "animals/cat/1.png,9,ben,-90,12,train,y\n",
    "animals/dog/0.PNG,9,anna,90,180,test,y\n",
]


def test_a_manifest_brings_labels_and_columns(animals):
    (animals / "photos.csv").write_text("\ufeff" + HEADER + "".join(ROWS), encoding="utf-8")
    found = load("csv", animals, path="photos.csv")
    assert (found.name, found.classes) == ("photos", ("9", "10"))
    assert found.train.labels.tolist() == [1, 0]
    assert found.train.images[:, 0, 0, 0].tolist() == [0, 1]
    assert found.test.images[:, 0, 0, 0].tolist() == [100]
    columns = found.train.columns
    assert columns["client"].tolist() == ["anna", "ben"]
    assert columns["lat"].tolist() == [0.5, -90.0]
    assert columns["lat"].dtype == columns["lon"].dtype == np.float64
    assert found.test.columns["camera"].tolist() == ["y"]
    assert "split" not in columns


def test_photos_without_a_place_are_at_no_client(animals):
    rows = [ROWS[0].replace("0.5,-180", ","), ROWS[1].replace("12", "nan"), ROWS[2]]
    rows.append("animals/dog/1.PNG,9,zoe,10,20,train,y\n")
    (animals / "photos.csv").write_text(HEADER + "".join(rows))
    train = load("csv", animals, path="photos.csv").train
    assert np.isnan(train.columns["lat"]).tolist() == [True, False, False]
    assert np.isnan(train.columns["lon"]).tolist() == [True, True, False]
    held = PARTITIONS["s2"](Pool(train, 2, 0, np.random.default_rng(0)), n_max=5)
    assert isinstance(held, fl.Holdings) and held.index.tolist() == [2]


def test_a_manifest_without_split_is_divided_like_a_folder(animals):
    files = sorted((animals / "animals").rglob("*.png")) + sorted(
        (animals / "animals").rglob("*.PNG")
    )
    rows = [f"{file.relative_to(animals)},{file.parent.name}\n" for file in files]
    (animals / "photos.csv").write_text("path,label\n" + "".join(rows))
    found = load("csv", animals, path="photos.csv", test_share=0.4, size=2)
    assert found.classes == ("cat", "dog")
    assert found.test.labels.bincount().tolist() == [4, 2]
    assert found.shape == (3, 2, 2)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "photos.csv is empty: begin it with the header"),
        ("path,label\n", "a header and no rows"),
        ("path,labl\n", r"photos.csv:1: unknown column 'labl': did you mean 'label'"),
        ("path,label,clinet\n", "unknown column 'clinet': did you mean 'client'"),
        ("path;label;client\n", "photos.csv:1: semicolons separate the columns: save it with co"),
        ("file;class\n", "photos.csv:1: semicolons separate the columns: save it with commas"),
        ("path\tlabel\n", "photos.csv:1: tabs separate the columns: save it with commas"),
        ("file,label\n", "no column 'path' among file, label"),
        ("path,label,label\n", "photos.csv:1: .*'label'"),
        ("path,label,lat\na.png,b,1\n", "lat and lon come together"),
        ("path,label\nanimals/cat/0.png\n", r"photos.csv:2: 1 cells under 2 columns"),
        ("path,label\nanimals/cat/0.png,\n", r"photos.csv:2: label is empty"),
        ("path,label\n\nanimals/cat/99.png,a\n", r"photos.csv:3: there is no file .*99.png'"),
        ("path,label\nanimals\\cat\\0.png,a\n", "write paths relative to .*, with / between fol"),
        (HEADER + ROWS[0] + ROWS[1].replace("-90", "-91"), r"photos.csv:3: lat is '-91': write"),
        (HEADER + ROWS[0].replace("-180", "inf"), "lon is 'inf'"),
        (HEADER + ROWS[0] * 2, r"photos.csv:3: 'animals/cat/0.png' is listed twice, in line 2 too"),
        ("path,label\n./animals/cat/0.png,a\nanimals/cat/0.png,b\n", "is listed twice"),
        (HEADER + ROWS[0].replace("-180", "west"), "lon is 'west'"),
        (HEADER + ROWS[0].replace("train", "trian"), "split is 'trian': did you mean 'train'"),
        (HEADER + ROWS[0] + ROWS[1], "no row has split test"),
        ('path,label\n"open,x\n', "set path to a csv file in UTF-8"),
    ],
)
def test_a_bad_manifest_says_where_and_what_to_do(animals, content, message):
    (animals / "photos.csv").write_text(content)
    with pytest.raises(ValueError, match=message):
        load("csv", animals, path="photos.csv")


@pytest.mark.parametrize("name", ["site", "hospital", "clinic", "patient"])
def test_a_column_of_ones_own_is_no_slip_of_another(animals, name):
    row = "animals/cat/{},cat,{}\n"
    rows = row.format("0.png", "a") + row.format("1.png", "b")
    (animals / "photos.csv").write_text(f"path,label,{name}\n{rows}")
    found = load("csv", animals, path="photos.csv", test_share=0.5, size=2)
    assert {*found.train.columns[name], *found.test.columns[name]} == {"a", "b"}


def test_a_manifest_that_is_not_text_or_not_there_says_so(animals):
    with pytest.raises(ValueError, match="path"):
        load("csv", animals, path="photos.csv")
    (animals / "photos.csv").write_bytes(b"path,label\n\xff\xfe,1\n")
    with pytest.raises(ValueError, match="UTF-8"):
        load("csv", animals, path="photos.csv")


def arrays(**changed: Any) -> dict[str, Any]:
    plain = {
        "x_train": pixels(6, 5, 4, 3),
        "y_train": np.array([0, 1, 2, 0, 1, 2]),
        "x_test": pixels(3, 5, 4, 3),
        "y_test": np.array([0, 1, 2]),
    }
    return {name: array for name, array in (plain | changed).items() if array is not None}


def test_a_numpy_file_brings_images_and_columns(tmp_path):
    writers = {"writer_train": np.arange(6), "writer_test": np.arange(3), "note": np.arange(9)}
    np.savez(tmp_path / "own.npz", **arrays(**writers))
    found = load("npz", tmp_path, path="own.npz")
    assert (found.name, found.shape, found.classes) == ("own", (3, 5, 4), ("0", "1", "2"))
    assert (found.train.images.permute(0, 2, 3, 1).numpy() == pixels(6, 5, 4, 3)).all()
    assert found.train.images.permute(0, 2, 3, 1).is_contiguous()
    assert set(found.train.columns) == {"writer"}
    assert found.test.columns["writer"].tolist() == [0, 1, 2]


def test_a_numpy_file_may_be_gray_and_name_its_classes(tmp_path):
    gray = {"x_train": pixels(6, 5, 4), "x_test": pixels(3, 5, 4)}
    np.savez_compressed(tmp_path / "own.npz", **arrays(**gray, classes=np.array(["a", "b", "c"])))
    found = load("npz", tmp_path, path="own.npz")
    assert (found.shape, found.classes) == ((1, 5, 4), ("a", "b", "c"))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"x_train": None}, "no array 'x_train'"),
        ({"x_train": None, "X_train": pixels(6, 5, 4)}, "did you mean 'X_train'"),
        ({"x_train": pixels(6, 5, 4, 3) / 255}, "x_train is float64 .*expected uint8"),
        ({"x_test": pixels(3, 3, 5, 4)}, r"x_test is uint8 \[3, 3, 5, 4\]"),
        ({"x_test": pixels(3, 5, 5, 3)}, "differ in shape"),
        ({"y_train": np.arange(5)}, r"y_train is int64 \[5\]: expected \[6\]"),
        ({"y_train": np.arange(6) - 1}, "whole numbers from 0"),
        ({"y_test": np.array([0.0, 1.0, 2.0])}, "y_test is float64"),
        ({"writer_train": np.arange(5)}, r"writer_train is \[5\]: expected \[6\]"),
        ({"classes": np.array(["a", "b"])}, "classes must name all 3 labels"),
        ({"writer_train": np.array([{}] * 6, object)}, "cannot be read "),
    ],
)
def test_a_numpy_file_that_does_not_fit_says_why(tmp_path, changed, message):
    np.savez(tmp_path / "own.npz", **arrays(**changed))
    with pytest.raises(ValueError, match=message):
        load("npz", tmp_path, path="own.npz")


def test_a_numpy_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ValueError, match="path"):
        load("npz", tmp_path, path="own.npz")
    file = tmp_path / "own.npz"
    np.savez_compressed(file, **arrays())
    whole = file.read_bytes()
    middle = len(whole) // 3
    broken = [whole[:-50], whole[:20], b"", whole[:middle] + b"?" * 8 + whole[middle + 8 :]]
    for content in broken:
        file.write_bytes(content)
        with pytest.raises(ValueError, match=r"own\.npz"):
            load("npz", tmp_path, path="own.npz")
    np.save(tmp_path / "one.npy", np.arange(3))
    with pytest.raises(ValueError, match="without a name"):
        load("npz", tmp_path, path="one.npy")


def test_mean_and_std_are_those_of_the_scaled_images():
    images = torch.from_numpy(pixels(2000, 3, 4, 4))
    mean, std = mean_and_std(images)
    scaled = images.double() / 255
    assert np.allclose(mean, scaled.mean((0, 2, 3)))
    assert np.allclose(std, scaled.std((0, 2, 3), correction=0))
    assert mean_and_std(torch.full((3, 1, 2, 2), 51, dtype=torch.uint8)) == ((0.2,), (1.0,))


def test_the_set_inside_the_package_is_balanced_and_shuffled():
    found = DATASETS["fashion-mnist-mini"](Source())
    assert found.shape == (1, 28, 28)
    assert found.train.labels.bincount().tolist() == [600] * 10
    assert found.test.labels.bincount().tolist() == [100] * 10
    assert len(found.train.labels[:100].unique()) == 10
    assert found.train.images.permute(0, 2, 3, 1).is_contiguous()
    mean, std = mean_and_std(found.train.images)
    assert found.mean is not None and found.std is not None
    assert np.allclose((mean, std), (found.mean, found.std), atol=0.01)


def test_a_damaged_set_inside_the_package_is_noticed(monkeypatch):
    monkeypatch.setattr(published, "MINI_SHA256", "0" * 64)
    published._mini.cache_clear()
    with pytest.raises(ValueError, match="damaged"):
        DATASETS["fashion-mnist-mini"](Source())
