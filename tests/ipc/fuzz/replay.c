/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Runs a fuzz target over files and folders of files, without libFuzzer. With --seconds or
 * --executions, it then runs mutated inputs for that time, or that many. Each has one to four
 * random edits, which may also truncate the input or splice two inputs.
 *
 *      replay-NAME [--seconds N | --executions N] [--seed N] PATH...
 */

#include <dirent.h>
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

#include "ipc/base/util.h"
#include "tests/ipc/fuzz/fuzz.h"
#include "tests/lib/oracle.h"

#define LARGE 1024u /* bytes: larger inputs are slow, and rarely mutated */
#define ROOM (128u << 10)

struct input {
        size_t size;
        uint8_t *data;
};

static struct input *inputs;
static unsigned n_files;

/* ---- as they are ----------------------------------------------------------------------------- */

static int replay_file(const char *path, off_t size) {
        uint8_t *data = malloc((size_t)size ?: 1);
        FILE *f = fopen(path, "re");
        int r = -1;

        if (f && data && fread(data, 1, (size_t)size, f) == (size_t)size) {
                r = LLVMFuzzerTestOneInput(data, (size_t)size);
                inputs = reallocarray(inputs, n_files + 1, sizeof *inputs);
                inputs[n_files++] = (struct input){(size_t)size, data};
        }
        if (f)
                fclose(f);
        return r;
}

static int replay(const char *path) {
        char name[4096];
        struct dirent *entry;
        struct stat st;
        int r = 0;
        DIR *d;

        if (stat(path, &st) < 0)
                return -1;
        if (!S_ISDIR(st.st_mode))
                return replay_file(path, st.st_size);
        d = opendir(path);
        while (d && r == 0 && (entry = readdir(d))) {
                snprintf(name, sizeof name, "%s/%s", path, entry->d_name);
                r = entry->d_name[0] == '.' ? 0 : replay(name);
        }
        if (d)
                closedir(d);
        return d ? r : -1;
}

/* ---- edited ---------------------------------------------------------------------------------- */

static const struct input *some_input(struct random *random) {
        const struct input *input = &inputs[random_below(random, n_files)];

        return input->size > LARGE && random_below(random, 64) ? some_input(random) : input;
}

/* A length, a type or a number of msgpack, at its limits. */
static uint8_t odd_byte(struct random *random) {
        static const uint8_t odd[] = {0,    1,    0x7f, 0x80, 0x8f, 0x90, 0x9f, 0xa0, 0xbf,
                                      0xc0, 0xc1, 0xc4, 0xc5, 0xc6, 0xca, 0xcb, 0xcc, 0xcf,
                                      0xd0, 0xd9, 0xdb, 0xdc, 0xdd, 0xde, 0xdf, 0xff};

        return odd[random_below(random, sizeof odd)];
}

static size_t insert(struct random *random, uint8_t *data, size_t size, size_t at) {
        if (size == ROOM)
                return size;
        memmove(data + at + 1, data + at, size - at);
        data[at] = odd_byte(random);
        return size + 1;
}

static size_t splice(struct random *random, uint8_t *data, size_t size, size_t at) {
        const struct input *other = some_input(random);
        size_t from = other->size ? random_below(random, (uint32_t)other->size) : 0,
               n = MIN(other->size - from, ROOM - at);

        memcpy(data + at, other->data + from, n);
        return MAX(size, at + n);
}

static size_t edit(struct random *random, uint8_t *data, size_t size) {
        size_t at = size ? random_below(random, (uint32_t)size) : 0;
        uint32_t how = size ? random_below(random, 16) : 6;

        if (how < 3)
                data[at] ^= (uint8_t)(1u << random_below(random, 8));
        else if (how < 6)
                data[at] = odd_byte(random);
        else if (how < 9)
                size = insert(random, data, size, at);
        else if (how < 11)
                memmove(data + at, data + at + 1, --size - at);
        else if (how < 13)
                size = at;
        else if (how < 14)
                size = splice(random, data, size, at);
        else
                data[at] = (uint8_t)random_below(random, 256);
        return size;
}

static uint64_t run_edited(struct random *random, uint64_t least, time_t end) {
        static uint8_t data[ROOM];
        uint64_t n = 0;

        for (; n < least || n % 4096 || time(NULL) < end; n++) {
                const struct input *input = some_input(random);
                size_t size = input->size;

                memcpy(data, input->data, size);
                for (uint32_t edits = 1 + random_below(random, 4); edits; edits--)
                        size = edit(random, data, size);
                LLVMFuzzerTestOneInput(data, size);
        }
        return n;
}

int main(int argc, char **argv) {
        static const struct option known[] = {{"seconds", required_argument, NULL, 's'},
                                              {"executions", required_argument, NULL, 'n'},
                                              {"seed", required_argument, NULL, 'r'},
                                              {0}};
        struct random random = {(uint64_t)time(NULL)};
        uint64_t seed, executions = 0;
        time_t end = 0;
        int c;

        while ((c = getopt_long(argc, argv, "", known, NULL)) != -1)
                switch (c) {
                case 's': end = time(NULL) + atoi(optarg); break;
                case 'n': executions = strtoull(optarg, NULL, 10); break;
                case 'r': random.state = strtoull(optarg, NULL, 10); break;
                default: return 2;
                }
        seed = random.state;
        for (int i = optind; i < argc; i++) {
                if (replay(argv[i]) == 0)
                        continue;
                fprintf(stderr, "%s: cannot be replayed\n", argv[i]);
                return 1;
        }
        printf("%u files\n", n_files);
        if ((end || executions) && n_files)
                printf("{\"executions\": %llu, \"seed\": %llu}\n",
                       (unsigned long long)run_edited(&random, executions, end),
                       (unsigned long long)seed);
        return n_files == 0;
}
