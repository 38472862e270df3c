/* SPDX-License-Identifier: Apache-2.0 */

/* Runs a fuzz target over files and folders of files, without libFuzzer. */

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>

#include "tests/ipc/fuzz/fuzz.h"

static unsigned n_files;

static int replay_file(const char *path, off_t size) {
        uint8_t *data = malloc((size_t)size ?: 1);
        FILE *f = fopen(path, "re");
        int r = -1;

        if (f && data && fread(data, 1, (size_t)size, f) == (size_t)size) {
                r = LLVMFuzzerTestOneInput(data, (size_t)size);
                n_files++;
        }
        if (f)
                fclose(f);
        free(data);
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

int main(int argc, char **argv) {
        for (int i = 1; i < argc; i++) {
                if (replay(argv[i]) == 0)
                        continue;
                fprintf(stderr, "%s: cannot be replayed\n", argv[i]);
                return 1;
        }
        printf("%u files\n", n_files);
        return n_files == 0;
}
